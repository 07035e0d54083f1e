"""Two ranks: a clean end, one rank killed, the launcher killed. Status, time to notice, orphans."""

import contextlib
import os
import signal
import time
import uuid
from pathlib import Path

import psutil

from campaigns.harness import GRACE_S, PPO, ROOT, Campaign, end_marked, marked, python

_CASES = (
    *("end torchrun", "end launcher", "rank 0 torchrun", "rank 1 torchrun", "rank 1 launcher"),
    *("parent torchrun", "parent launcher"),
)


def run_campaign(campaign: Campaign) -> None:
    """Run each case once."""
    for case in campaign.while_time(_CASES):
        victim, launcher = case.rsplit(" ", 1)
        folder = campaign.fresh(case)
        mark, log = uuid.uuid4().hex, Path(f"{folder}.log")
        steps = 2 if victim == "end" else 400
        words: list[object] = [ROOT / "examples" / "train_gpt_ppo.py", *PPO]
        words += [f"trainer.ppo.max_steps={steps}", "trainer.devices=2", "model.micro_batch_size=4"]
        words += ["critic.micro_batch_size=4", f"exp_manager.explicit_log_dir={folder}"]
        if launcher == "torchrun":
            torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", 2)
            words = [*torchrun, "--standalone", *words]
        process = python(*words, log=log, mark=mark)
        try:
            if victim != "end":
                _wait_for(folder / "metrics.jsonl", process, 120)
                time.sleep(campaign.rng.uniform(0.1, 2.0))
                _kill(victim, process.pid, mark)
            started = time.monotonic()
            with contextlib.suppress(Exception):
                process.wait(120)
            elapsed_s, status = time.monotonic() - started, process.poll()
            survivors = end_marked(mark, GRACE_S)
        finally:
            end_marked(mark, 0)
        right = status == 0 if victim == "end" else status not in (0, None)
        lines = log.read_text(errors="replace").strip().splitlines()
        note = f"status {status} after {elapsed_s:.1f} s, left {survivors}; {lines[-1:]}"
        campaign.record(case, right and not survivors, note)


def _wait_for(path: Path, process: object, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)


def _kill(victim: str, parent: int, mark: str) -> None:
    if victim == "parent":
        os.kill(parent, signal.SIGKILL)
        return
    rank = victim.split()[1]
    for process in marked(mark).values():
        with contextlib.suppress(psutil.Error):
            words, environment = " ".join(process.cmdline()), process.environ()
            is_worker = "train_gpt_ppo" in words and "torch.distributed.run" not in words
            # torchrun gives RANK. A process that the first one starts has LOCAL_RANK only.
            if is_worker and environment.get("RANK", environment.get("LOCAL_RANK", "0")) == rank:
                process.kill()
                return
    raise RuntimeError(f"no process of rank {rank} was found to kill")
