"""Conversations whose turns vLLM samples: of an agent behind an address, of a game ahead."""

import json

import pytest
import user_agents
from played import kept_batches, turns_of
from runs import train
from test_engine_kills import AHEAD, VLLM

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
GAME = {"recipe": "ppo_tiny_guessing_cpu"}
STEPS = ["trainer.ppo.max_steps=2", "trainer.ppo.save_interval=2"]


def test_agents_are_answered_by_vllm(tmp_path, fresh_nemo, ray, monkeypatch):
    batches = kept_batches(monkeypatch)
    saw = tmp_path / "saw.jsonl"
    agent = [
        *("environment.kind=endpoint", f"environment.factory={user_agents.__file__}:run"),
        f"+environment.kwargs={{what: each_turn, name: a, saw: {saw}}}",
        *("environment.max_tokens=200", "model.ppo.length_params.max_length=6"),
    ]
    records = train(tmp_path / "run", fresh_nemo, *VLLM, *STEPS, *agent, **GAME)[0]
    steps = [record for record in records if "train_rollouts/rewards" in record]
    assert len(steps) == 2
    for step in steps:
        assert step["train_rollouts/rewards"] == 2.25
        assert (step["train_rollouts/turns"], step["train_rollouts/forks"]) == (3, 0)
        assert 0 < step["sampler/logprob_gap_max"] < 1e-4
        assert step["train_optim/grad_norm"] > 0
    # Every batch of the run, those of its validations too, has what its agents were answered.
    seen = sorted(json.loads(line) for line in saw.open())
    rows = [turns for batch in batches for turns in turns_of(batch)]
    assert {len(turns) for turns in rows} == {3}
    kept = sorted(turn[:3] for turns in rows for turn in turns)
    assert len(seen) == len(kept) >= 3 * 32
    for one, other in zip(kept, seen, strict=True):
        assert one[:2] == other[:2]
        assert one[2] == pytest.approx(other[2], abs=1e-6)


def test_a_game_is_played_one_step_ahead(tmp_path, fresh_nemo, ray):
    """In step: `test_engine_kills`."""
    # So many conversations, and so wide a range, that some guess of a random model is rewarded.
    many = [
        *("model.ppo.num_rollout_samples=64", "data.train.arguments.size=128"),
        "environment.kwargs.high=99",
    ]
    records = train(tmp_path / "run", fresh_nemo, *VLLM, *AHEAD, *STEPS, *many, **GAME)[0]
    steps = [record for record in records if "train_rollouts/rewards" in record]
    assert len(steps) == 2
    for step in steps:
        assert 1 < step["train_rollouts/turns"] <= 3
        assert step["train_rollouts/rewards"] > 0
        assert step["train_optim/grad_norm"] > 0
    gaps = [step["sampler/logprob_gap_max"] for step in steps]
    assert 0 < gaps[0] < 1e-4
    assert gaps[1] > 1e-3  # turns of the weights before the first update
    assert all("train_optim/importance_weight" in step for step in steps)
