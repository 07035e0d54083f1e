"""Defects that this library's ancestor was known for, and that cannot happen here.

Tests of ranks that share samples, of losses that need micro-batches of 1, and of errors of remote
workers are with their subjects.
"""

import json
import re

import pytest
import recipes
import torch
from batches import ppo_batch
from newest_state import newest

from aligner.algorithms.rollout.rollout import prompts_batch, rollout_of
from aligner.checkpoint.run_state.store import RunStateStore
from aligner.config import CriticConfig, ModelConfig, OptimConfig
from aligner.data.batches import PromptBatch
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.workers import LocalCluster
from aligner.errors import DamagedStateError, NonFiniteError
from aligner.losses.language import NegativeLogLikelihoodLoss
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt import MegatronGPTRSModel, load_from_nemo
from aligner.models.gpt.decode.sampling import counter_uniforms
from aligner.models.gpt.role.settings import RoleSettings, RunSettings
from aligner.models.value.lm_value import Value
from aligner.observe.metrics import MetricsWriter, read_metrics, read_samples
from aligner.parallel.groups import initialize_parallel

EOS = 2
PAST_FLOAT32 = 2**24 + 1  # float32 makes 2**24 of it

# Masks padded with the EOS id -----------------------------------------------------------------


def prompts_of(lengths):
    """Prompts of so many tokens, all EOS."""
    return PromptBatch(
        input_ids=torch.full((len(lengths), max(lengths)), EOS),
        input_lengths=torch.tensor(lengths),
        prompt_ids=torch.arange(len(lengths)),
        texts=["p"] * len(lengths),
        ground_truths=[None] * len(lengths),
        columns={},
    )


def rollout(prompt_lengths, response_lengths):
    """Responses full of EOS tokens, in rows that EOS fills up."""
    lengths = torch.tensor(prompt_lengths) + torch.tensor(response_lengths)
    ids = torch.full((len(lengths), int(lengths.max())), EOS)
    output = {
        "output_ids": ids,
        "unpadded_sequence_lengths": lengths,
        "is_end": torch.ones(len(lengths), dtype=torch.bool),
        "logprobs": torch.zeros(ids.shape),
    }
    data = prompts_batch(prompts_of(prompt_lengths), first_sample_id=0)
    return rollout_of(data, BatchedDataDict(output))


def test_a_mask_is_padded_with_zero_where_eos_is_the_pad_token():
    narrow, wide = rollout([3, 1], [2, 1]), rollout([4], [5])
    joined = BatchedDataDict.from_batches([narrow, wide], pad_value_dict={"input_ids": EOS})
    assert (joined["input_ids"] == EOS).all()
    assert joined["token_mask"].sum(1).tolist() == [2, 1, 5]
    assert joined["token_mask"][0].tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0]
    for shard in joined.shard_by_batch_size(3):
        assert set(shard["token_mask"].unique().tolist()) <= {0.0, 1.0}


# NaN from a micro-batch of padding ------------------------------------------------------------


def responses(rows=4):
    """Rows of different lengths; the mask tells what is learned."""
    batch = ppo_batch([10, 5, 8, 6], [3] * 4)
    batch["advantages"] = torch.ones(4, 10)
    return {name: column[:rows] for name, column in batch.items()}


@pytest.fixture(scope="module")
def actor(tiny_nemo):
    settings = RoleSettings(optim=OptimConfig(lr=1e-3))
    actor = load_from_nemo(MegatronGPTRSModel, settings, restore_path=tiny_nemo)
    actor.setup_training()
    actor.prepare_for_training()
    return actor


def loss_and_gradient(actor, loss, batch, mbs):
    """Of one pass in micro-batches of ``mbs`` rows; no weight moves."""
    actor.loss_fn = loss
    actor.optimizer.zero_grad()
    value, _ = actor.get_loss_and_metrics(batch, forward_only=False, mbs=mbs)
    return value, torch.cat([p.main_grad.flatten() for p in actor.gpt.parameters()])


@pytest.mark.parametrize("loss", [NegativeLogLikelihoodLoss(), PPOPolicyLoss(entropy_bonus=0.01)])
def test_a_micro_batch_of_padding_adds_nothing(actor, loss):
    alone, gradient = loss_and_gradient(actor, loss, responses(2), 2)
    padded = responses(4)
    padded["token_mask"][2:] = 0  # the whole second micro-batch
    value, other = loss_and_gradient(actor, loss, padded, 2)
    assert value == pytest.approx(alone, rel=1e-5)
    assert torch.isfinite(other).all()
    torch.testing.assert_close(other, gradient, atol=1e-6, rtol=1e-4)


# A run of PPO ---------------------------------------------------------------------------------

PROMPTS, ROLLOUTS, PER_PROMPT = 6, 8, 4  # so two prompts a step


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_nemo):
    """One epoch; policy and critic are told different things wherever they can be."""
    folder = tmp_path_factory.mktemp("run")
    recipes.run(
        *(folder, tiny_nemo, "ppo_tiny_cpu", "exp_manager.save_nemo=false"),
        f"exp_manager.samples_per_step={ROLLOUTS}",
        f"data.train.arguments.size={PROMPTS}",
        "data.validation=null",
        "trainer.ppo.max_steps=-1",
        "trainer.ppo.save_interval=1",
        f"model.ppo.num_rollout_samples={ROLLOUTS}",
        f"model.ppo.num_rollouts_per_prompt={PER_PROMPT}",
        *("model.global_batch_size=8", "model.micro_batch_size=4", "model.optim.lr=1e-3"),
        *("critic.global_batch_size=4", "critic.micro_batch_size=2", "critic.optim.lr=2e-3"),
    )
    return folder


def test_no_prompt_is_skipped_where_prompts_have_several_rollouts(run):
    asked = {}
    for sample in read_samples(run / "samples.jsonl"):
        asked.setdefault(sample.prompt, []).append(sample.step)
    assert len(asked) == PROMPTS
    assert all(len(steps) == PER_PROMPT and len(set(steps)) == 1 for steps in asked.values())
    last = read_metrics(run / "metrics.jsonl")[-1]
    assert last["step"] == PROMPTS * PER_PROMPT // ROLLOUTS
    assert last["progress/consumed_samples"] == PROMPTS * PER_PROMPT
    [newest, *_] = sorted((run / "run_state").glob("step_*"), reverse=True)
    assert json.loads((newest / "state.json").read_text())["learner"]["sampler"]["position"] == 6


def test_every_section_is_read_by_its_own_role(run):
    last = read_metrics(run / "metrics.jsonl")[-1]
    assert (last["train_optim/lr"], last["critic/lr"]) == (1e-3, 2e-3)
    assert (last["train_optim/optimizer_steps"], last["critic/optimizer_steps"]) == (3, 6)


# Trainer state in file names, counters through float32 ----------------------------------------


def test_no_state_of_the_trainer_is_in_a_file_name(run):
    names = [path.name for path in (run / "run_state").iterdir()]
    assert all(re.fullmatch(r"step_\d{6}", name) for name in names)
    store = RunStateStore(run / "run_state")
    path = newest(store)
    before = store.load(path)
    renamed = path.rename(path.with_name("step_000777"))
    with pytest.raises(DamagedStateError, match="has the step 3"):  # a name cannot tell another one
        store.load(renamed)
    after = store.load(renamed.rename(path.with_name("copy")))
    after.path.rename(path)
    assert after.step == before.step == 3
    assert after.state["learner"] == before.state["learner"]


def test_counters_are_whole_numbers_of_any_size(tmp_path):
    assert torch.tensor(float(PAST_FLOAT32), dtype=torch.float32).item() != PAST_FLOAT32
    store = RunStateStore(tmp_path / "states")
    path = store.save(1, {"learner": {"consumed_samples": PAST_FLOAT32}})
    assert store.load(path).state["learner"]["consumed_samples"] == PAST_FLOAT32
    metrics = MetricsWriter(tmp_path)
    metrics.write(1, {"progress/consumed_samples": PAST_FLOAT32})
    metrics.close()
    [line] = read_metrics(tmp_path / "metrics.jsonl")
    assert line["progress/consumed_samples"] == PAST_FLOAT32


def test_samples_beyond_float32_are_still_told_apart():
    data = prompts_batch(prompts_of([1, 1]), first_sample_id=PAST_FLOAT32 - 1)
    ids = data["sample_ids"]
    assert ids.tolist() == [PAST_FLOAT32 - 1, PAST_FLOAT32]
    first, second = counter_uniforms(1, ids, torch.zeros(2).long()).tolist()
    assert first != second


# Errors of a critic that somebody else trains -------------------------------------------------


def test_an_error_while_the_critic_trains_reaches_the_trainer(tiny_nemo, tmp_path):
    model = ModelConfig(restore_from_path=str(tiny_nemo))
    value = Value(
        LocalCluster(initialize_parallel()),
        CriticConfig(global_batch_size=4, micro_batch_size=2),
        byte_level_tokenizer(),
        model=model,
        run=RunSettings(non_finite="stop", non_finite_dir=tmp_path),
    )
    batch = BatchedDataDict(responses())
    batch["values"] = torch.zeros(4, 10)
    batch["returns"] = torch.full((4, 10), float("nan"))
    value.prepare_for_training()
    with pytest.raises(NonFiniteError, match="critic"):
        value.train(batch, PPOValueLoss(value_clip=None))
