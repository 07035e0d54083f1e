"""PPO on a separate Ray cluster: a worker killed, the driver killed. Same bits, nothing left over.

The reference is the same run on the local engine, which agrees with Ray to the bit and starts in a
third of the time.
"""

import contextlib
import importlib.util
import os
import signal
import subprocess
import time
import uuid
from pathlib import Path

import psutil

from campaigns.harness import ROOT, TINY, Campaign, end_marked, learned, marked, python

_LONGEST_S = 180  # of any wait: a start takes half a minute of two busy cores
_VICTIMS = ("policy", "value", "driver")


def run_campaign(campaign: Campaign) -> None:
    """Run once undisturbed, then with as many victims as there is time for."""
    if importlib.util.find_spec("ray") is None:
        campaign.left_out.append("all cases: Ray is not installed")
        return
    alone = campaign.fresh("alone")
    status, survivors = _run_alone(alone, "local")
    campaign.record(
        "left alone", status == 0 and not survivors, f"status {status}, left {survivors}"
    )
    if status:
        return
    for victim in campaign.while_time(_VICTIMS):
        folder, mark = campaign.fresh(victim), uuid.uuid4().hex
        process = python(*_words(folder, "ray"), log=Path(f"{folder}.log"), mark=mark)
        try:
            target, deadline = campaign.rng.randint(1, 5), time.monotonic() + _LONGEST_S
            while process.poll() is None and _lines(folder) < target:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
            time.sleep(campaign.rng.uniform(0, 0.4))
            pid = process.pid if victim == "driver" else _worker(victim, mark)
            if pid is None:
                campaign.record(victim, False, "no such worker was found")
                continue
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LONGEST_S)
            status, survivors = (
                process.poll(),
                end_marked(mark, 30 if process.poll() is not None else 0),
            )
        finally:
            end_marked(mark, 0)
        if victim == "driver":
            status, more = _run_alone(folder, "ray")
            survivors += more
        if status != 0:
            last = Path(f"{folder}.log").read_text(errors="replace").strip().splitlines()[-1:]
            campaign.record(victim, False, f"killed at line {target}: status {status}; {last}")
            continue
        equal = [x == y for x, y in zip(learned(alone), learned(folder), strict=True)]
        note = f"killed at line {target}: status {status}, left {survivors}, the same {equal}"
        campaign.record(victim, status == 0 and all(equal) and not survivors, note)


def _words(folder: Path, engine: str) -> list[object]:
    return [
        *(ROOT / "examples" / "train_gpt_ppo.py", "--config-name", "recipes/ppo_tiny_cpu"),
        *("exp_manager.create_tensorboard_logger=false", "data.validation.arguments.size=8"),
        *("trainer.ppo.max_steps=6", "trainer.ppo.save_interval=2"),
        *("trainer.ppo.val_check_interval=3", f"cluster.engine={engine}"),
        # Kills fall anywhere in a step, not only between two.
        *("reward.function=campaigns.slow_reward:reward", "++reward.kwargs.seconds=0.2"),
        *(f"model.restore_from_path={TINY}", f"exp_manager.explicit_log_dir={folder}"),
    ]


def _run_alone(folder: Path, engine: str) -> tuple[int | None, list[str]]:
    mark = uuid.uuid4().hex
    process = python(*_words(folder, engine), log=Path(f"{folder}.log"), mark=mark)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_LONGEST_S)
    return process.poll(), end_marked(mark, 30 if process.poll() is not None else 0)


def _lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _worker(role: str, mark: str) -> int | None:
    """Return the process that writes the log of the role's first worker."""
    for pid, process in marked(mark).items():
        with contextlib.suppress(psutil.Error, OSError):
            files = " ".join(os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir())
            if f"workers/lm_{role}-0.log" in files:
                return pid
            if "ray::" in " ".join(process.cmdline()) and role in files.lower():
                return pid
    return None
