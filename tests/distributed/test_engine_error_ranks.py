"""Two data ranks with conversations, of which one's engine fails.

1. Both begin the conversations again, and have the numbers of a run in which nothing failed, in
   training (groups of GRPO) and in validation.
2. Where the budget is spent both stop with the cause. Begun again, the run goes on from its state
   to the same end.
3. What ends a run at once ends both ranks.
"""

import os
from functools import partial

import pytest
import recipes
from ranks import run_ranks

from aligner.catalog import ALGORITHMS
from aligner.config.cli import launch
from aligner.models.gpt.decode.generator import Generator

GAME = "aligner.examples.tasks.games"
OPTIONS = [
    *("reward=environment", f"environment.factory={GAME}:GuessingGame"),
    *("+environment.kwargs={high: 3, guesses: 3}", "environment.max_tokens=128"),
    *("environment.concurrency=4", "environment.retries=2"),
    *(f"data.train.source={GAME}:guessing_games", f"+data.validation.source={GAME}:guessing_games"),
    *("+data.validation.arguments={split: validation, size: 4}", "trainer.devices=2"),
    *("trainer.ppo.max_steps=2", "trainer.ppo.save_interval=1", "trainer.ppo.val_check_interval=1"),
    *("trainer.ppo.advantage.estimator=grpo", "model.ppo.num_rollouts_per_prompt=2"),
    *("model.ppo.num_rollout_samples=8", "model.ppo.length_params.max_length=2"),
    *("model.global_batch_size=8", "model.micro_batch_size=4"),
    "exp_manager.create_tensorboard_logger=false",
]
FAILED = "rollouts/failed_engine_error"


def launch_failing(error, failing):
    """Run GRPO, in which rank 1's engine raises ``error`` in the calls ``failing``, from 1."""
    sample, calls = Generator.sample, 0

    def broken(generator, *arguments, **given):
        nonlocal calls
        calls += 1
        if os.environ["RANK"] == "1" and calls in failing:
            raise error("the device fell off the bus")
        return sample(generator, *arguments, **given)

    Generator.sample = broken
    algorithm = ALGORITHMS["reinforce"]
    launch(algorithm.builder, recipes.CONF, algorithm.config_name, algorithm.root_class)


def run(folder, nemo, failing=(), error=RuntimeError, *overrides):
    places = [f"model.restore_from_path={nemo}", f"exp_manager.explicit_log_dir={folder}"]
    arguments = [*OPTIONS, *overrides, *places]
    run_ranks(partial(launch_failing, error, failing), 2, arguments, timeout_s=150)


def numbers(folder):
    """Metrics but for times, and how many conversations the engine failed in each prefix."""
    lines = recipes.numbers(folder)
    failed = {
        prefix: sum(line.pop(f"{prefix}_{FAILED}", 0) for line in lines)
        for prefix in ("train", "val")
    }
    return lines, failed


def said_by(error):
    """What each rank said."""
    _, *of_ranks = str(error.value).split("--- rank ")
    assert len(of_ranks) == 2
    return of_ranks


@pytest.fixture(scope="module")
def calm(tmp_path_factory, tiny_nemo):
    folder = tmp_path_factory.mktemp("calm")
    run(folder, tiny_nemo)
    lines, failed = numbers(folder)
    assert len(lines) == 3  # before the first step, and two
    assert failed == {"train": 0, "val": 0}
    return lines


def test_what_failed_leaves_no_trace(tmp_path, tiny_nemo, calm):
    run(tmp_path, tiny_nemo, (2, 8))
    lines, failed = numbers(tmp_path)
    assert lines == calm
    assert all(failed.values()), failed


@pytest.mark.extended
def test_a_run_that_stopped_goes_on(tmp_path, tiny_nemo, calm):
    with pytest.raises(AssertionError) as caught:
        run(tmp_path, tiny_nemo, range(12, 1000))
    for said in said_by(caught):
        assert "exit code 2" in said
        assert "EnvironmentCallError: 3 conversations or engine calls failed" in said
        assert "generate failed on rank 1: RuntimeError: the device fell off the bus" in said
    assert len(numbers(tmp_path)[0]) < 3
    run(tmp_path, tiny_nemo)
    assert numbers(tmp_path)[0] == calm


@pytest.mark.extended
@pytest.mark.parametrize(
    ("error", "layout"),
    [
        (ValueError, "model.tensor_model_parallel_size=1"),
        (RuntimeError, "model.tensor_model_parallel_size=2"),
    ],
)
def test_what_ends_the_run_at_once_ends_both_ranks(tmp_path, tiny_nemo, error, layout):
    with pytest.raises(AssertionError) as caught:
        run(tmp_path, tiny_nemo, (2,), error, layout)
    zero, one = said_by(caught)
    assert f"{error.__name__}: the device fell off the bus" in one
    assert "exit code 0" not in zero + one
    assert "begins again" not in zero + one
