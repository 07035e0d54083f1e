"""Training functions with adapters, engines, backends and objects chosen by overrides."""

import os
from pathlib import Path

import pytest
import test_train
import torch

import aligner
from aligner.algorithms.callbacks import Callback
from aligner.errors import ConfigError

pytestmark = pytest.mark.extended


def train(model, folder, max_steps=2, **overrides):
    settings = {name.replace("__", "."): value for name, value in overrides.items()}
    return test_train.train(model, folder, max_steps=max_steps, overrides=settings)


def logprobs_of_transformers(folder, prompt, response):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in (prompt, response)]
    tokens = torch.tensor([[*ids[0], *ids[1]]])
    with torch.no_grad():
        logprobs = model(tokens).logits.log_softmax(-1)[0, :-1]
    return logprobs.gather(-1, tokens[0, 1:, None])[len(ids[0]) - 1 :, 0].tolist()


@pytest.mark.parametrize(
    "choice", [{"model__peft__peft_scheme": "lora"}, {"policy__backend": "dtensor"}]
)
def test_a_trained_policy_is_what_transformers_loads(tiny_nemo, tmp_path, choice):
    result = train(tiny_nemo, tmp_path / "run", **choice)
    logprobs = result.policy.logprobs(["1 + 1 = "], ["23"])[0]
    folder = result.save(tmp_path / "hf")
    # 1e-4: the tolerance of log-probs against transformers in float32.
    assert logprobs_of_transformers(folder, "1 + 1 = ", "23") == pytest.approx(logprobs, abs=1e-4)
    with aligner.load_model(tiny_nemo) as first:
        before = first.logprobs(["1 + 1 = "], ["23"])[0]
    assert max(abs(a - b) for a, b in zip(before, logprobs, strict=True)) > 1e-3
    # The result is the model of the next function.
    rows = [{"prompt": "1 + 1 = ", "response": "2"}] * 4
    tuned = aligner.train_sft(
        model=result, data=rows, max_steps=1, batch_size=4, output_dir=tmp_path / "sft"
    )
    assert tuned.metrics[-1]["step"] == 1


def objects(log: Path, bonus: float):
    """A loss, an estimator and a callback that read variables of the enclosing function."""

    class Gain:
        def __init__(self, weight=1.0):
            self.weight = weight

        def __call__(self, outputs, batch, denominators):
            counts = (batch["token_mask"] * batch["sample_mask"][:, None]).bool()
            gain = torch.where(counts, batch["advantages"] * outputs.values_or_logprobs, 0)
            loss = -self.weight * gain.sum() / denominators.valid_tokens
            return loss, {"counted_tokens": counts.sum() * bonus}

    def above_mean(rewards, margin=0.0):
        return (rewards > rewards.mean() + margin).float() + bonus

    class StopsEarly(Callback):
        def on_step_end(self, run, step, metrics):
            with log.open("a") as file:
                file.write(f"{step} {metrics['custom/counted_tokens']}\n")
            if step == 2:
                run.stop("seen enough")

    return {
        "model__ppo__loss": Gain,
        "model__ppo__loss_kwargs__weight": 0.5,
        "trainer__ppo__advantage__estimator": above_mean,
        "trainer__ppo__advantage__kwargs__margin": 0.1,
        "trainer__callbacks": [StopsEarly],
    }


def test_objects_of_every_kind_reach_the_run_and_belong_to_its_identity(tiny_nemo, tmp_path):
    log = tmp_path / "log"
    result = train(tiny_nemo, tmp_path / "run", max_steps=9, **objects(log, bonus=2.0))
    assert [line["step"] for line in result.metrics][-1] == 2
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [int(step) for step, _ in lines] == [1, 2]
    tokens = [m["train_rollouts/generated_tokens"] for m in result.metrics[1:]]
    assert [float(counted) for _, counted in lines] == [2.0 * count for count in tokens]
    assert result.metrics[-1]["train_rollouts/advantages_min"] >= 2.0
    with pytest.raises(ConfigError, match=r"model\.ppo\.loss"):
        train(tiny_nemo, tmp_path / "run", max_steps=9, **objects(log, bonus=3.0))
    assert os.fspath(result).endswith("policy.nemo")
