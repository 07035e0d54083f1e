"""A run over conversations whose driver is killed in the middle of them comes to the same end."""

import pytest
from ranks import run_ranks
from recipes import ROOT, numbers, settings

from aligner.checkpoint.nemo.model_file import open_nemo

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
    files = [tmp_path / name / "policy.nemo" for name in ("through", "killed")]
    with open_nemo(files[0]) as one, open_nemo(files[1]) as other:
        assert all(one.weights[name].equal(other.weights[name]) for name in one.weights)
