"""A run that SIGKILL stops, wherever, ends with the numbers and weights of one that was left alone.

Whole processes that run the script users start; the killed run is killed once while stepping and
once while it is saving.
"""

import os
import signal
import time

import pytest
from recipes import numbers, trained_hash

from aligner.observe.metrics import read_metrics

PATIENCE_S = 600  # a run takes seconds, many times that on a crowded machine
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def start(start_run):
    """``start(folder)`` begins or continues a run there."""
    return lambda folder: start_run(
        *("train_gpt_ppo", folder, "--config-name", "recipes/ppo_tiny_cpu"),
        *("trainer.ppo.max_steps=7", "trainer.ppo.save_interval=2"),
        "trainer.ppo.val_check_interval=3",
    )


def finished(process, folder):
    """What all processes of this run have printed, once the last one has ended well."""
    process.join(PATIENCE_S)
    output = folder.with_suffix(".log").read_text()
    assert process.exitcode == 0, output
    return output


def wait_for(condition, process):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill(process):
    process.kill()
    process.join(PATIENCE_S)
    assert process.exitcode == -signal.SIGKILL


def result(folder):
    return numbers(folder), trained_hash(folder)


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory, start):
    folder = tmp_path_factory.mktemp("left_alone") / "run"
    output = finished(start(folder), folder)
    ending = "\n".join(output.splitlines()[-5:])
    for word in ("report", "samples", "metrics", "checkpoint", "trained .nemo"):
        assert word in ending
    return result(folder)


def test_killed_twice(tmp_path, start, left_alone):
    folder = tmp_path / "run"
    states = folder / "run_state"

    process = start(folder)
    wait_for(lambda: len(read_metrics(folder / "metrics.jsonl")) > 3, process)  # step 3 is made
    wait_for(lambda: any(states.glob("step_*")), process)  # and the state of step 2 is whole
    kill(process)
    process = start(folder)
    wait_for(lambda: any(states.glob(".tmp-step_*")), process)  # a state is being written
    kill(process)
    output = finished(start(folder), folder)
    assert "resumed after step" in " ".join(output.split())
    assert result(folder) == left_alone


@pytest.mark.extended
def test_sigterm_saves_and_exits_cleanly(tmp_path, start, left_alone):
    folder = tmp_path / "run"
    process = start(folder)
    wait_for(lambda: len(read_metrics(folder / "metrics.jsonl")) > 1, process)
    os.kill(process.pid, signal.SIGTERM)
    output = finished(process, folder)
    assert "the same command continues" in " ".join(output.split())
    finished(start(folder), folder)
    assert result(folder) == left_alone


# With a reference that was asked and a baseline of the policy.
KTO = [
    *("--config-name", "recipes/kto_tiny_cpu"),
    "trainer.dpo.max_steps=6",
    "trainer.dpo.save_interval=2",
    "trainer.dpo.val_check_interval=3",
    "data.train.arguments.size=192",
    "data.validation.arguments.size=16",
]


def test_a_preference_run_that_is_killed_asks_its_reference_once(tmp_path, start_run):
    def start(folder):
        return start_run("train_gpt_dpo", folder, *KTO)

    alone, killed = tmp_path / "alone", tmp_path / "killed"
    finished(start(alone), alone)
    process = start(killed)
    # Step 3 is made, and the state of step 2, which is written beside it, is whole.
    wait_for(lambda: len(read_metrics(killed / "metrics.jsonl")) > 3, process)
    wait_for(lambda: any((killed / "run_state").glob("step_*")), process)
    kill(process)
    asked = (killed / "reference_logprobs.pt").stat().st_mtime_ns
    finished(start(killed), killed)
    assert (killed / "reference_logprobs.pt").stat().st_mtime_ns == asked  # not asked again
    assert result(killed) == result(alone)
