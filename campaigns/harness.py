"""Common parts of the campaigns: runs of the scripts in forked children, leftovers, the tally.

The heavy imports happen once, in this process. A case is a fork of it that leads a session of its
own, so that killing it and finding what outlived it concern no other process.
"""

import atexit
import contextlib
import os
import random
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

import aligner.algorithms.distill.build
import aligner.algorithms.ppo.trainer
import aligner.algorithms.preference.build
import aligner.algorithms.supervised.build
import aligner.models.gpt  # noqa: F401 - imported for the children

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "models" / "tiny.nemo"
_MARK = "ALIGNER_CAMPAIGN"
# A rank that outlives another needs up to 6 s to see it, report it and unwind. One that has just
# been started imports everything before it can look.
GRACE_S = 60.0
Case = TypeVar("Case")

# One step of PPO in a second. A case adds what it is about.
PPO = (
    *("--config-name", "recipes/ppo_tiny_cpu", f"model.restore_from_path={TINY}"),
    *("exp_manager.create_tensorboard_logger=false", "trainer.ppo.max_steps=1"),
    *("trainer.ppo.val_check_interval=0", "data.validation.arguments.size=4"),
    *("model.ppo.num_rollout_samples=8", "model.global_batch_size=8", "model.micro_batch_size=8"),
    *("critic.global_batch_size=8", "critic.micro_batch_size=8"),
)


@dataclass
class Campaign:
    """One campaign while it runs: its random generator, its time, its folder and its tally."""

    name: str
    seed: int
    minutes: float
    folder: Path
    trials: int = 0
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.seed} {self.name}")
        self._started = time.monotonic()
        self._ended: float | None = None

    @property
    def seconds(self) -> float:
        """Since it began, until it ended."""
        return (self._ended or time.monotonic()) - self._started

    def end(self) -> None:
        """End the trials."""
        self._ended = time.monotonic()

    @property
    def seconds_left(self) -> float:
        """Seconds until it is to end."""
        return self.minutes * 60 - self.seconds

    def while_time(self, cases: Sequence[Case]) -> Iterator[Case]:
        """Yield ``cases`` in random order while there is time, at least one case."""
        order = list(cases)
        self.rng.shuffle(order)
        for number, case in enumerate(order):
            if number and self.seconds_left <= 0:
                self.left_out.append(f"{len(order) - number} of {len(order)} cases")
                return
            yield case

    def record(self, case: str, good: bool, note: str) -> None:
        """Record the result of a trial."""
        self.trials += 1
        if not good:
            self.failures.append(f"{case}: {note}")
        words = " ".join(note.split())
        print(
            f"  {'ok  ' if good else 'FAIL'} {self.seconds:4.0f} s  {case} | {words[:230]}",
            flush=True,
        )

    def fresh(self, name: str) -> Path:
        """Return the path of an empty folder that does not exist yet."""
        path = self.folder / "".join(c if c.isalnum() or c in "._-" else "_" for c in name)[:80]
        shutil.rmtree(path, ignore_errors=True)
        return path

    def summary(self) -> str:
        """Return one line on the whole campaign."""
        state = "FAILED" if self.failures else "passed"
        suffix = f"; out of time for {', '.join(self.left_out)}" if self.left_out else ""
        return (
            f"{self.name:16s} {state}: {self.trials} trials, {len(self.failures)} failures, "
            f"{self.seconds:.0f} s{suffix}"
        )


@dataclass(frozen=True)
class Outcome:
    """How a run ended, and what it left."""

    status: int  # minus the signal that ended it
    output: str
    seconds: float
    survivors: tuple[int, ...]  # processes that outlived it
    timed_out: bool

    @property
    def verdict(self) -> str:
        """In a word. Good ones are ``ok`` and ``refused``."""
        if self.timed_out:
            return "HANG"
        if self.status < 0:
            return f"signal {-self.status}"
        if "Traceback (most recent call last)" in self.output:
            return "TRACEBACK"
        word = {0: "ok", 2: "refused"}.get(self.status, f"status {self.status}")
        return f"{word}, processes left" if self.survivors else word

    @property
    def is_clean(self) -> bool:
        """True if it ended well or was refused by name."""
        return self.verdict in ("ok", "refused")

    @property
    def last(self) -> str:
        """The most informative line."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or [""])[-1]


class Run:
    """A script, or a function, in a forked child that leads a session."""

    def __init__(
        self,
        script: str | None,
        arguments: Sequence[object] = (),
        *,
        log: Path,
        call: Callable[[], None] | None = None,
        memory_gib: float | None = None,
    ) -> None:
        """Start ``examples/<script>.py``, or ``call``. ``memory_gib`` limits the address space.

        ``log`` is written anew, so it is of this run only.
        """
        self.log, self._mark = log, uuid.uuid4().hex
        self._started = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._child(script, arguments, call, memory_gib)

    def _child(
        self,
        script: str | None,
        arguments: Sequence[object],
        call: Callable[[], None] | None,
        memory_gib: float | None,
    ) -> None:
        status = 99
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.environ.update({_MARK: self._mark, "COLUMNS": "300", "PYTHONPATH": str(ROOT)})
            os.chdir(ROOT)
            with open(self.log, "ab") as log, open(os.devnull) as nothing:
                os.dup2(nothing.fileno(), 0)
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            if memory_gib is not None:
                limit = int(memory_gib * 2**30)
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            status = _status_of(call or (lambda: _run_script(script, arguments)))
            sys.stdout.flush()
            sys.stderr.flush()
            atexit._run_exitfuncs()
        finally:
            os._exit(status)

    def poll(self) -> bool:
        """Return whether the run has ended."""
        if not hasattr(self, "_status"):
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if not done:
                return False
            self._status = os.waitstatus_to_exitcode(status)
        return True

    def send(self, number: signal.Signals, whole_group: bool = True) -> None:
        """Send a signal to the whole group, or to its first process, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if whole_group else os.kill)(self.pid, number)

    def finish(self, timeout_s: float) -> Outcome:
        """Wait. After ``timeout_s`` it is killed. What outlived it is named and then killed too."""
        deadline = time.monotonic() + timeout_s
        timed_out = False
        while not self.poll():
            if time.monotonic() > deadline:
                timed_out = True
                self.send(signal.SIGKILL)
            time.sleep(0.01)
        grace = time.monotonic() + GRACE_S
        while (survivors := self.survivor_pids()) and time.monotonic() < grace:
            time.sleep(0.05)
        for pid in survivors:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        output = self.log.read_text(errors="replace")
        seconds = time.monotonic() - self._started
        return Outcome(self._status, output, seconds, tuple(survivors), timed_out)

    def survivor_pids(self) -> list[int]:
        """Return the processes of the run's session, and processes that it started."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid in (os.getpid(), self.pid):
                    continue
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                is_ours = os.getsid(process.pid) == self.pid
                if is_ours or process.environ().get(_MARK) == self._mark:
                    processes.append(process.pid)
        return processes


def run(
    campaign: Campaign,
    script: str | None,
    arguments: Sequence[object] = (),
    *,
    timeout_s: float = 60.0,
    call: Callable[[], None] | None = None,
    memory_gib: float | None = None,
) -> Outcome:
    """Run `Run` to its end."""
    log = campaign.folder / "run.log"
    child = Run(script, arguments, log=log, call=call, memory_gib=memory_gib)
    return child.finish(timeout_s)


def learned(folder: Path) -> tuple[list[dict[str, Any]], str, dict[str, str]]:
    """Return metrics without timers, samples and weight digests of a run."""
    import hashlib
    import json

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    metrics = [
        {key: value for key, value in json.loads(line).items() if not key.startswith("timers/")}
        for line in lines
    ]
    samples = folder / "samples.jsonl"
    files = [*folder.glob("*.nemo"), *folder.glob("*.safetensors")]
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return metrics, samples.read_text() if samples.exists() else "", digests


def python(*words: object, log: Path, mark: str) -> "subprocess.Popen[bytes]":
    """Start a separate process with a separate interpreter, for code that cannot be forked."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, _MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with open(log, "ab") as stream:
        return subprocess.Popen(
            [sys.executable, *map(str, words)],
            cwd=ROOT,
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )


def marked(mark: str) -> dict[int, psutil.Process]:
    """Return the processes that `python` started with ``mark``, and their descendants."""
    processes = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                processes[process.pid] = process
    return processes


def end_marked(mark: str, grace_s: float) -> list[str]:
    """Kill marked processes after ``grace_s`` and return their command lines."""
    deadline = time.monotonic() + grace_s
    while (survivors := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    lines = []
    for process in survivors.values():
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(process.cmdline())[:100])
            process.kill()
    return lines


@contextlib.contextmanager
def served(
    campaign: Campaign, *words: object, ready: str, timeout_s: float = 180.0
) -> "Iterator[tuple[int, subprocess.Popen[bytes]]]":
    """Run a server with `python`. Yield its port and its process, which ends with the block.

    ``ready``: regular expression of what the server prints once it listens. Its group is the port.

    Raises:
        RuntimeError: the server ended, or did not print it within ``timeout_s``.
    """
    log, mark = campaign.folder / "serve.log", uuid.uuid4().hex
    log.unlink(missing_ok=True)
    process = python("-u", *words, log=log, mark=mark)
    try:
        deadline, port = time.monotonic() + timeout_s, None
        while port is None and process.poll() is None and time.monotonic() < deadline:
            port = re.search(ready, log.read_text())
            time.sleep(0.1)
        if port is None:
            raise RuntimeError(f"the server did not start: {log.read_text()[-300:]}")
        yield int(port[1]), process
    finally:
        end_marked(mark, 0)


def _run_script(script: str | None, arguments: Sequence[object]) -> None:
    path = ROOT / "examples" / f"{script}.py"
    sys.argv = [str(path), *map(str, arguments)]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def _status_of(call: Callable[[], None]) -> int:
    try:
        call()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 2 if end.code.startswith("error: ") else 1
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


torch.set_num_threads(1)
