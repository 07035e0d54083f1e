"""Rollouts whose engine fails: begun again from their seeds, within the budget, with the cause.

The engine is the tiny policy itself. A call that fails does so behind the third token that it
sampled, in the middle of its decoding.
"""

import dataclasses
from traceback import walk_tb
from types import SimpleNamespace

import pytest
import user_environments as envs
from conversations import collected, same
from loaded import load_policy
from test_overlap import Played, ThreadedEngine, configuration

from aligner.algorithms.rollout.environments import EnvironmentReward, EnvironmentRollouts
from aligner.algorithms.rollout.rollout import score
from aligner.errors import ConfigError, EnvironmentCallError, WorkerError
from aligner.models.gpt.decode.generator import Generator

pytestmark = pytest.mark.integration

ROWS = [{"name": str(number), "turns": 2 + number % 2} for number in range(4)]


class Breaking:
    """What happens to the engine's calls: those with the numbers of ``at`` raise ``error``."""

    def __init__(self):
        self.calls, self.at, self.error = 0, frozenset(), None

    def __call__(self, at, error=None):
        self.calls, self.at = 0, frozenset(at) if at != "all" else range(1, 10**9)
        self.error = error or RuntimeError("CUDA error: uncorrectable ECC error")


@pytest.fixture(autouse=True)
def _whole_batches(monkeypatch):
    """Batches have all conversations that can ask, also on a busy machine."""
    monkeypatch.setattr(EnvironmentRollouts, "gather_s", 30.0)


@pytest.fixture
def breaking(monkeypatch):
    found, sample = Breaking(), Generator.sample

    def broken(generator, *arguments, **given):
        found.calls += 1
        if found.calls not in found.at:
            return sample(generator, *arguments, **given)
        heard = []

        def listen(*token):
            heard.append(token)
            if len(heard) == 3:
                raise found.error

        sample(generator, *arguments, **{**given, "listener": listen})
        raise AssertionError("fewer than three tokens were sampled")

    monkeypatch.setattr(Generator, "sample", broken)
    return found


@pytest.fixture
def game(tiny_nemo):
    """Rollouts of the tiny policy over conversations."""
    policy = load_policy(configuration(tiny_nemo).model)

    def collect(rows=ROWS, make=envs.Echo, per_prompt=2, **settings):
        return collected(make, rows, per_prompt, engine=policy, max_tokens=200, **settings)

    return SimpleNamespace(policy=policy, collect=collect)


def without_failures(batch, *others):
    return {name: column for name, column in batch.items() if name not in ("failures", *others)}


@pytest.mark.parametrize(("at", "concurrency"), [(1, 16), (2, 3)])
def test_the_samples_are_those_of_a_calm_engine(game, breaking, at, concurrency):
    """Groups of two: all that waited for the call that failed are played again, and no other."""
    calm = game.collect(concurrency=concurrency)
    breaking({at})
    batch = game.collect(concurrency=concurrency, retries=1)
    same(without_failures(batch), without_failures(calm))
    hit = [failures for failures in batch["failures"] if failures]
    assert hit == [["engine_error"]] * min(8, concurrency)
    metrics = score(EnvironmentReward(), batch)
    assert metrics["failed_engine_error"] == min(8, concurrency)
    assert metrics["failed_env_error"] == 0
    assert score(EnvironmentReward(), calm)["failed_engine_error"] == 0


def test_calls_count_once_in_the_budget_which_ends_with_the_cause(game, breaking):
    """Eight conversations wait for each of two calls that fail, with a budget of two."""
    breaking({1, 3})
    batch = game.collect(retries=2)
    assert sum(map(len, batch["failures"])) > 8
    breaking({1, 3})
    with pytest.raises(EnvironmentCallError, match=r"2 conversations or engine calls .*retries=1"):
        game.collect(retries=1)
    breaking("all")
    with pytest.raises(EnvironmentCallError) as caught:
        game.collect(retries=3)
    assert breaking.calls == 4
    assert caught.value.__cause__ is breaking.error
    said = "The last failure: the engine raised RuntimeError: CUDA error"
    assert said in str(caught.value)
    assert "environment.retries=3" in str(caught.value)


def test_failures_of_both_kinds_share_the_budget(game, breaking, tmp_path):
    """After one of the environment's own the policy has other random numbers, as without."""

    def played(marker, at, retries):
        breaking(at)
        rows = [{"marker": str(tmp_path / marker), "turns": 2}]
        return game.collect(rows, envs.FailsTwice, 1, retries=retries)

    calm = played("calm", (), 2)
    batch = played("both", {1, 3}, 4)
    same(without_failures(batch, "columns"), without_failures(calm, "columns"))
    both = ["engine_error", "env_error", "engine_error", "env_error"]
    assert [batch["failures"][0], calm["failures"][0]] == [both, ["env_error"] * 2]
    said = r"4 conversations.*retries=3.* The last failure: not"
    with pytest.raises(EnvironmentCallError, match=said):
        played("spent", {1, 3}, 3)


def test_what_the_failed_call_held_is_let_go(game, breaking):
    """The next call may need the memory of its cache."""
    breaking("all")
    with pytest.raises(EnvironmentCallError) as caught:
        game.collect(retries=1)
    trace = caught.value.__cause__.__traceback__
    frames = {frame.f_code.co_name: frame for frame, _ in walk_tb(trace)}
    assert frames["_roll_out"].f_locals == {}


def test_what_is_not_the_engine_s_fault_ends_the_run_at_once(game, breaking):
    for error in (ConfigError("a key"), ValueError("a shape"), KeyboardInterrupt()):
        breaking("all", error)
        with pytest.raises(type(error)) as caught:
            game.collect()
        assert (breaking.calls, caught.value) == (1, error)
    for error in (WorkerError("a worker"), MemoryError()):  # of the engine
        breaking({1}, error)
        assert game.collect()["failures"] == [["engine_error"]] * 8


@pytest.mark.parametrize("axis", ["tensor_model", "pipeline_model", "context", "expert_model"])
def test_workers_that_generate_together_end_the_run(game, breaking, axis):
    """One that fails by itself has left the others in a collective of the call."""
    size = {f"{axis}_parallel_size": 2}
    game.policy.model = dataclasses.replace(game.policy.model, **size)
    breaking({1})
    with pytest.raises(RuntimeError, match="CUDA error"):
        game.collect()
    assert breaking.calls == 1


def test_conversations_ahead(tiny_nemo, breaking, monkeypatch):
    """Those of the thread that samples while the policy trains."""

    def run(at):
        played = Played(tiny_nemo, retries=2)
        breaking(at)
        for number in (1, 2):
            played.step(number)
        played.rollouts.close()
        return played.seen

    monkeypatch.setattr(ThreadedEngine, "recover", lambda engine: engine.own.recover())
    calm = run(())
    shaken = run({5})
    failed = [sum(map(len, batch["failures"])) for batch in shaken]
    assert failed[0] == 0 < failed[1]
    for one, other in zip(calm, shaken, strict=True):
        same(without_failures(one), without_failures(other))
