"""Runs over conversations on two processes: killed and continued, and with agents of rank 0."""

import pytest
from ranks import run_ranks
from recipes import ROOT, numbers, settings
from test_resume_algorithms import assert_same_weights

from aligner.observe.metrics import read_metrics

SCRIPT = ROOT / "examples" / "train_gpt_ppo.py"
# Kills the process that started it, rank 0's, at the 45th message of all.
KILLS = """
import os, signal
from aligner.examples.tasks.games import GuessingGame

class Kills(GuessingGame):
    def __init__(self, *, count="", **given):
        super().__init__(**given)
        self.count = count

    def step(self, message):
        if self.count:
            with open(self.count, "a") as file:
                file.write("x")
            if os.path.getsize(self.count) == 45:
                os.kill(os.getppid(), signal.SIGKILL)
        return super().step(message)
"""


@pytest.mark.extended
def test_two_processes_killed_in_the_middle_of_conversations(tmp_path, tiny_nemo):
    factory = tmp_path / "kills.py"
    factory.write_text(KILLS)

    def run(name, *overrides):
        arguments = [
            *("--config-name", "recipes/ppo_tiny_guessing_cpu"),
            *(*settings(tmp_path / name, tiny_nemo), f"environment.factory={factory}:Kills"),
            *("trainer.devices=2", "trainer.ppo.max_steps=4", "trainer.ppo.save_interval=1"),
            *("trainer.ppo.val_check_interval=0", "data.validation=null"),
            *("model.ppo.num_rollout_samples=8", "environment.concurrency=4"),
            *("model.global_batch_size=8", "model.micro_batch_size=4"),
            *("critic.global_batch_size=8", "critic.micro_batch_size=4"),
            *overrides,
        ]
        run_ranks(SCRIPT, 2, arguments, 240)

    run("through")
    count = tmp_path / "count"
    with pytest.raises(AssertionError, match="rank 0, exit code -9"):
        run("killed", f"+environment.kwargs.count={count}")
    assert 1 <= len(numbers(tmp_path / "killed")) < 4
    run("killed", f"+environment.kwargs.count={count}")
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "through")
    assert_same_weights(tmp_path / "through", tmp_path / "killed")


AGENT = ROOT / "tests" / "unit" / "user_agents.py"


@pytest.mark.extended
def test_two_processes(tmp_path, tiny_nemo):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"name": "{n}"}}\n' for n in range(4)))

    def run(ranks):
        folder = tmp_path / str(ranks)
        arguments = [
            *("--config-name", "gpt_ppo", "reward=environment", "environment.kind=endpoint"),
            *(*settings(folder, tiny_nemo), f"environment.factory={AGENT}:graded"),
            *("environment.max_tokens=200", f"data.train.source={tmp_path / 'rows.jsonl'}"),
            *(f"trainer.devices={ranks}", "trainer.ppo.max_steps=2"),
            *("model.ppo.length_params.max_length=6", "model.ppo.num_rollout_samples=4"),
            *("model.global_batch_size=4", "model.micro_batch_size=2"),
            *("critic.global_batch_size=4", "critic.micro_batch_size=2"),
        ]
        run_ranks(SCRIPT, ranks, arguments, 200)
        lines = read_metrics(folder / "metrics.jsonl")
        return [line for line in lines if "train_rollouts/rewards" in line]

    one, two = run(1), run(2)
    assert len(one) == len(two) >= 1
    for key in ("turns", "rewards", "generation_length"):
        assert one[0][f"train_rollouts/{key}"] == two[0][f"train_rollouts/{key}"]
    assert two[0]["train_rollouts/turns"] == 2
