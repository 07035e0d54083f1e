"""The PPO step over handles that only keep records."""

from pathlib import Path

import pytest
import torch
from conversations import generated
from settings import parsed

from aligner.algorithms.ppo.build import make_policy_loss, needs_reference, rows_scored_by_training
from aligner.algorithms.ppo.trainer import PPOTrainer
from aligner.algorithms.rollout.inputs import Prompts
from aligner.data.batches import Prompt, PromptSampler
from aligner.data.prompts import PromptDataset
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.observe.metrics import PhaseTimers, check_names
from aligner.rewards.function.runner import ScoredResponses

PAD = 0
RESPONSES = 2  # tokens of every response


class Handle:
    """A role that notes its calls, with rows or folder; ``answers``: what its methods return."""

    def __init__(self, log, name, **answers):
        self.log, self.name, self.answers, self.trained = log, name, answers, []

    def __getattr__(self, method):
        if method.startswith(("prepare_for", "finish_", "weights_changed")):
            return lambda *_, **__: True

        def call(given, *_):
            self.log.append((f"{self.name}.{method}", getattr(given, "size", given)))
            if method == "train":
                self.trained.append(given)
            return self.answers[method](given) if method in self.answers else None

        return call


class FakePolicy(Handle):
    """Two tokens to every prompt; even sample ids end properly. Log-prob -1, reference -1.5."""

    def generate(self, data, greedy=False, *, seed=0, sampling_options=None):
        self.log.append(("policy.generate", data["sample_ids"].tolist(), seed))
        columns = data["input_lengths"].tolist(), data["sample_ids"].tolist()
        rows = [
            ([1] * length + [7] * RESPONSES, [-1.25] * (length + RESPONSES), sample % 2 == 0)
            for length, sample in zip(*columns, strict=True)
        ]
        return generated(rows, RESPONSES)


def column(name, value):
    return lambda data: BatchedDataDict({name: torch.full(data["input_ids"].shape, value)})


def rewards(data):
    return ScoredResponses(["r"] * data.size, data["is_end"].float() * 2, {"x": [1.0, 3.0]})


def result(**metrics):
    """What an update returns."""
    steps = {"grad_norm": 1.0, "lr": 1e-3, "skipped": 0.0, **metrics}
    found = {"loss": metrics["loss"], "all_mb_metrics": {k: [v] for k, v in steps.items()}}
    return lambda data: found


def trainer(log=None, *, prompts=4, ppo=None, loop=None, global_batch_size=1):
    log = [] if log is None else log
    config = parsed(
        {
            **{"model.global_batch_size": global_batch_size, "model.micro_batch_size": 1},
            **{"critic.global_batch_size": 1, "critic.micro_batch_size": 1, "seed": 5},
            "model.ppo": {"num_rollout_samples": 2, **(ppo or {})},
            "trainer.ppo": {"initial_policy_kl_penalty": 0.0, "gae_lambda": 1.0, **(loop or {})},
        }
    )
    rows = [Prompt(i, f"p{i}", [1] * (1 + i % 2), str(i), {}) for i in range(prompts)]
    dataset = PromptDataset(rows)
    per_step = config.model.ppo.num_rollout_samples // config.model.ppo.num_rollouts_per_prompt
    policy = FakePolicy(
        *(log, "policy"),
        get_logprobs=column("logprobs", -1.0),
        get_reference_policy_logprobs=column("reference_logprobs", -1.5),
        train=result(loss=1.0, ppo_ratio=1.0, logprob_gap_mean=0.1, logprob_gap_max=0.2),
    )
    updated = result(loss=2.0, clip_fraction=0.0)
    return PPOTrainer(
        config=config,
        policy=policy,
        value=Handle(log, "value", get_values=column("values", 0.5), train=updated),
        reward=Handle(log, "reward", get_rewards=rewards),
        prompts=Prompts(dataset, dataset),
        sampler=PromptSampler(prompts, per_step, seed=5, shuffle=False),
        generation=policy,
        pad_id=PAD,
        policy_loss=make_policy_loss(config),
        estimator=None,
    )


def names(log):
    return [entry[0] for entry in log]


def test_passes_that_nobody_needs_are_not_made():
    t = trainer()
    t.step(1, PhaseTimers())
    assert ("policy.get_logprobs", 1) in t.policy.log  # the second mini-batch alone
    assert "policy.get_reference_policy_logprobs" not in names(t.policy.log)
    assert [(data.size, "prev_logprobs" in data) for data in t.policy.trained] == [
        *((1, False), (1, True))
    ]
    t = trainer(global_batch_size=2)
    t.step(1, PhaseTimers())
    assert "policy.get_logprobs" not in names(t.policy.log)
    assert [(data.size, "prev_logprobs" in data) for data in t.policy.trained] == [(2, False)]


KL = {"initial_policy_kl_penalty": 0.1}
REPETITION = {"sampling_params": {"repetition_penalty": 1.1}}
KL_LOSS = {"kl_loss": {"coef": 0.1}}


@pytest.mark.parametrize(
    ("ppo", "loop", "rows"),
    [
        ({}, {}, 1),
        ({"ppo_epochs": 2}, {}, 0),
        ({}, KL, 1),
        (REPETITION, KL, 0),
        ({"sampling_params": {"top_k": 5}, "length_params": {"min_length": 4}}, KL, 0),
        (REPETITION, {}, 1),
        (KL_LOSS, {}, 1),
        ({"correction": {"weights": "token", "geometric_bounds": [0.9, 1.1]}}, {}, 1),
        ({"correction": {"second_moment": 0.04}}, {}, 0),
    ],
)
def test_rows_that_training_itself_scores(ppo, loop, rows):
    assert rows_scored_by_training(trainer(ppo=ppo, loop=loop).config) == rows


def test_stages_in_order():
    assert not needs_reference(trainer().config)
    assert needs_reference(trainer(loop=KL).config)
    assert needs_reference(trainer(ppo=KL_LOSS).config)
    log = []
    t = trainer(log, loop={"critic_warmup_steps": 1})
    check_names(t.step(1, PhaseTimers()).metrics)
    drawn = ["policy.generate", "reward.get_rewards", "value.get_values"]
    assert names(log) == [*drawn, "value.train"]
    log.clear()
    t.step(2, PhaseTimers())
    assert "policy.train" in names(log)
    log = []
    t = trainer(log, loop=KL, ppo={"ppo_epochs": 2})
    check_names(t.step(1, PhaseTimers()).metrics)
    assert names(log) == [
        *(*drawn, "policy.get_logprobs", "policy.get_reference_policy_logprobs"),
        *["value.train", "policy.train"] * 2,
    ]


def test_advantages_and_returns_by_hand():
    """Prompt lengths 1 and 2; rewards 2 and 0; values 0.5; gamma = lambda = 1, no KL."""
    t = trainer(loop={"normalize_advantages": False})
    t.step(1, PhaseTimers())
    # The critic saw both rows: the return of every generated token is the reward.
    assert t.value.trained[-1]["returns"].tolist() == [[0, 2, 2, 0], [0, 0, 0, 0]]
    assert t.value.trained[-1]["token_mask"].tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    # The policy's last mini-batch was row 1: advantage = return - value.
    assert t.policy.trained[-1]["advantages"].tolist() == [[0, 0, -0.5, -0.5]]


def test_kl_is_charged_per_token():
    """k1 = -1 - -1.5 = 0.5; beta = 0.1: each token costs 0.05."""
    loop = {**KL, "normalize_advantages": False}
    t = trainer(loop=loop, ppo=REPETITION)  # so that log-probs are computed
    metrics = t.step(1, PhaseTimers()).metrics
    returns = t.value.trained[-1]["returns"]
    torch.testing.assert_close(returns[0], torch.tensor([0, 1.9, 1.95, 0]))
    assert metrics["train_rollouts/init_policy_kl"] == pytest.approx(0.5)
    assert metrics["train_rollouts/init_policy_kl_per_sample"] == pytest.approx(1.0)
    assert metrics["train_rollouts/kl_penalty"] == pytest.approx(0.1)
    assert metrics["train_rollouts/rewards_with_kl"] == pytest.approx(0.9)
    # Row 0 by the sampler: k1 = -1.25 - -1.5 = 0.25; row 1 by a pass: 0.5.
    t = trainer(loop=loop)
    t.step(1, PhaseTimers())
    assert ("policy.get_logprobs", 1) in t.policy.log
    returns = t.value.trained[-1]["returns"]
    torch.testing.assert_close(returns[0], torch.tensor([0, 1.95, 1.975, 0]))


SAMPLER = {"old_logprobs": "sampler"}


@pytest.mark.parametrize(
    ("ppo", "loop", "warnings"),
    [
        ({}, {}, [1, 0]),
        ({}, {"critic_warmup_steps": 1}, [0, 1]),
        ({"correction": SAMPLER}, {}, [1, 0]),
        ({"correction": SAMPLER, "ppo_epochs": 2}, {}, [0, 0]),  # the gap has an update in it
    ],
)
def test_the_first_gap_above_rounding_is_said(ppo, loop, warnings):
    t = trainer(ppo=ppo, loop=loop)
    said = [t.step(step, PhaseTimers()).warnings for step in (1, 2)]
    assert [len(each) for each in said] == warnings
    assert all("logprob_gap_mean=0.1, more than rounding" in text for each in said for text in each)


def test_sample_ids_go_on_and_validation_draws_the_same_numbers():
    log = []
    t = trainer(log, ppo={"num_rollouts_per_prompt": 2})
    t.step(1, PhaseTimers())
    t.step(2, PhaseTimers())
    assert [e[1:] for e in log if e[0] == "policy.generate"] == [([0, 1], 5), ([2, 3], 5)]
    assert t.value.trained[-1]["input_ids"].tolist() == [[1, 1, 7, 7], [1, 1, 7, 7]]  # prompt 1
    log = []
    t = trainer(log, prompts=3)
    first, second = t.validate(0, PhaseTimers()), t.validate(9, PhaseTimers())
    drawn = [e[1:] for e in log if e[0] == "policy.generate"]
    assert drawn[:2] == drawn[2:]
    assert [ids for ids, _ in drawn[:2]] == [[0, 1], [2]]
    assert all(seed != 5 for _, seed in drawn)
    assert first.metrics["val_rollouts/num_samples"] == 3
    check_names(first.metrics)
    assert second.samples[0].step == 9


def test_adaptive_kl_coefficient_moves_with_the_policy_and_survives_a_resume():
    options = {**KL, "kl_controller": {"mode": "adaptive", "target": 0.5, "horizon": 10}}
    t = trainer(loop={**options, "critic_warmup_steps": 1})
    t.step(1, PhaseTimers())
    assert t.kl_controller.value == 0.1
    t = trainer(loop=options)
    t.step(1, PhaseTimers())
    # KL per sample 1.0 is twice the target: error clipped to 0.2, times 2 samples / 10.
    assert t.kl_controller.value == pytest.approx(0.1 * 1.04)
    again = trainer(loop=options)
    assert dict(t.roles) == {"policy": t.policy, "value": t.value}
    again.load(t.state_dict(), Path("state"))
    assert again.kl_controller.value == t.kl_controller.value
    assert again.consumed_samples == 2
    assert again.sampler.next_batch() == t.sampler.next_batch()
    assert again.policy.log == [
        *(("policy.load_state", Path("state/policy")), ("value.load_state", Path("state/value")))
    ]
