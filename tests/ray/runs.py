"""A small PPO run on either engine, in this process or in one of its own."""

import os
import shutil
import signal
import subprocess
import sys

import recipes
from recipes import ROOT, numbers, trained_hash

from aligner.distributed.worker_groups import RayWorkerGroup
from aligner.errors import current_step

STEPS = 3
SMALL = [
    # Some sample of every step is rewarded: without a signal the gradient is rounding noise, which
    # Adam makes steps of, and no two layouts round alike.
    *("seed=2", "exp_manager.save_top_k=5", f"trainer.ppo.max_steps={STEPS}"),
    # What is not measured is not kept beside the newest state.
    *("trainer.ppo.save_interval=1", "trainer.ppo.val_check_interval=1"),
    *("model.global_batch_size=16", "model.micro_batch_size=8", "model.ppo.num_rollout_samples=16"),
    *("critic.global_batch_size=16", "critic.micro_batch_size=8"),
    *("data.train.arguments.size=64", "data.validation.arguments.size=8"),
]
ON_RAY = "cluster.engine=ray"


def settings(folder, nemo, *overrides):
    return [*recipes.settings(folder, nemo), *SMALL, *overrides]


def train(folder, nemo, *overrides, recipe="ppo_tiny_cpu"):
    """The run, driven by this process."""
    recipes.run(folder, nemo, recipe, *SMALL, *overrides)
    return result(folder)


SCRIPT = ROOT / "examples" / "train_gpt_ppo.py"


def start(folder, nemo, *overrides, environment=None, recipe="ppo_tiny_cpu", script=SCRIPT):
    """The run in a process of its own, as users start it."""
    arguments = ["--config-name", f"recipes/{recipe}", *settings(folder, nemo, *overrides)]
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        cwd=folder.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(process, limit_s=900):
    output, _ = process.communicate(timeout=limit_s)
    assert process.returncode == 0, output
    return output


def result(folder):
    """The metrics, and the hash of the weights."""
    return numbers(folder), trained_hash(folder)


def go_back_to(step, source, folder):
    """A copy of a run as it was after ``step``."""
    shutil.copytree(source, folder)
    (folder / "policy.nemo").unlink()
    for state in (folder / "run_state").glob("step_*"):
        if int(state.name.removeprefix("step_")) > step:
            shutil.rmtree(state)
    return folder


def largest_difference(one, other):
    """Over all metrics of all steps, relative to 1 or to the larger value."""
    assert [line["step"] for line in one] == [line["step"] for line in other]
    assert [line.keys() for line in one] == [line.keys() for line in other]
    pairs = (
        (a[name], b[name])
        for a, b in zip(one, other, strict=True)
        for name in a
        if not isinstance(a[name], str)
    )
    return max(abs(a - b) / max(1.0, abs(a)) for a, b in pairs)


class Killer:
    """Kills the first worker of ``victim`` once at each of ``moments``, with the call under way.

    A moment is the step, the role that is called and the method.
    """

    def __init__(self, monkeypatch, victim, moments):
        self.moments, self.killed, self.step = list(moments), [], 0
        groups, real_call = {}, RayWorkerGroup._start_call
        real_start = RayWorkerGroup._start_workers

        def start(group, *arguments):
            groups[group.name_prefix] = group
            real_start(group, *arguments)

        def call(group, method_name, *arguments):
            answer = real_call(group, method_name, *arguments)
            self.step = current_step() or self.step  # a state is saved after its step
            if (self.step, group.name_prefix, method_name) in self.moments[:1]:
                del self.moments[0]
                self.killed.append(groups[victim]._identities[0].pid)
                os.kill(self.killed[-1], signal.SIGKILL)
            return answer

        monkeypatch.setattr(RayWorkerGroup, "_start_call", call)
        monkeypatch.setattr(RayWorkerGroup, "_start_workers", start)
