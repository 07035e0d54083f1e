"""Environments that misbehave in one conversation of eight, and ones that are killed from outside.

Where the fault comes once, the run goes on (unless ``init`` returned a wrong object): it is counted
under its reason, and the other seven conversations are those of an undisturbed run, to the bit.
Where it comes each time the conversation begins again, the run stops and names the cause. Nothing
remains.
"""

import contextlib
import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from campaigns.harness import TINY, Campaign, Outcome, Run, run

_ERROR, _TIMEOUT = "env_error", "env_timeout"
_SLEEPER = (
    "subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(15, "
    "signal.SIG_IGN); signal.signal(1, signal.SIG_IGN); time.sleep(100)'], start_new_session=True)"
)
_WRITE = "\n        for fd in range(3, 400):\n            try: os.write(fd, {})\n"
_WRITE += "            except OSError: pass\n        "
# What the environment does in place of its answer, and how that fails. None: it does not.
_FAULTS: dict[str, tuple[str, str | None]] = {
    "raises": ("raise KeyError('x')", _ERROR),
    "raises_base": ("raise BaseException('x')", _ERROR),
    "raises_huge": ("raise ValueError('z' * 50_000_000)", _ERROR),
    "raises_strange": ("raise Strange()", _ERROR),
    "raises_surrogate": ("raise ValueError('\\ud800 \\x00')", _ERROR),
    "keyboard": ("raise KeyboardInterrupt", _ERROR),
    "stop_iteration": ("raise StopIteration", _ERROR),
    "recursion": ("return again()", _ERROR),
    "sys_exit": ("sys.exit(0)", _ERROR),
    "os_exit": ("os._exit(0)", _ERROR),
    "segfault": ("ctypes.string_at(0)", _ERROR),
    "abort": ("os.abort()", _ERROR),
    "kills_itself": ("os.kill(os.getpid(), signal.SIGKILL)", _ERROR),
    "kills_its_group": ("os.killpg(0, signal.SIGKILL)", _ERROR),
    "dies_with_a_sleeper": (f"{_SLEEPER}; os.kill(os.getpid(), signal.SIGKILL)", _ERROR),
    "eats_memory": ("self.held = []\n        while True: self.held.append(bytes(2**24))", _ERROR),
    "child_eats_memory": (
        "subprocess.run([sys.executable, '-c', 'x = []\\nwhile True: x.append(bytes(2**24))'], "
        "check=True, stderr=subprocess.DEVNULL)",
        _ERROR,
    ),
    "floods_its_answer": ("return Turn([{'role': 'user', 'content': 'x' * 2**25}])", _ERROR),
    "no_turn": ("return 3", _ERROR),
    "none": ("return None", _ERROR),
    "says_nothing": ("return Turn()", _ERROR),
    "nan": ("return Turn([], float('nan'), True)", _ERROR),
    "huge_reward": ("return Turn([], 1e39, True)", _ERROR),
    "huge_integer": ("return Turn([], 10**400, True)", _ERROR),
    "reward_in_words": ("return Turn([], 'much', True)", _ERROR),
    "no_messages": ("return Turn([3], 1.0)", _ERROR),
    "speaks_for_the_policy": ("return Turn([{'role': 'assistant', 'content': 'a'}], 1.0)", _ERROR),
    "closes_its_pipe": ("os.closerange(3, 400); return turn", _ERROR),
    "closes_everything": ("os.closerange(0, 400); return turn", _ERROR),
    "writes_junk": (_WRITE.format("b'junk that is not an answer'") + "return turn", _ERROR),
    "writes_half": (
        _WRITE.format("b'\\x93ALN' + bytes(6) + b'\\1\\0'") + "time.sleep(100)",
        _TIMEOUT,
    ),
    "endless_messages": ("return Turn(forever(), 1.0)", _ERROR),
    "hangs": ("time.sleep(1000)", _TIMEOUT),
    "hangs_in_c": ("ctypes.CDLL(None).pause()", _TIMEOUT),
    "hangs_with_the_gil": ("ctypes.PyDLL(None).sleep(1000)", _TIMEOUT),
    "is_busy": ("\n        while True: pass", _TIMEOUT),
    "stops_itself": ("os.kill(os.getpid(), signal.SIGSTOP)", _TIMEOUT),
    "ignores_signals": ("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)", _TIMEOUT),
    "hangs_with_sleepers": (f"[{_SLEEPER} for _ in range(5)]; time.sleep(100)", _TIMEOUT),
    "forks_and_hangs": (
        "\n        for _ in range(20):\n            if os.fork() == 0: os.setsid(); os.fork(); "
        "time.sleep(100)\n        time.sleep(100)",
        _TIMEOUT,
    ),
    "forks_and_returns": ("os.fork(); return turn", None),
    "leaves_a_sleeper": (f"{_SLEEPER}; return turn", None),
    "leaves_a_thread": (
        "threading.Thread(target=time.sleep, args=(100,)).start(); return turn",
        None,
    ),
    "prints_much": ("print('x' * 20_000_000); return turn", None),
    "reads_stdin": ("sys.stdin.read(); return turn", None),
    "changes_directory": ("os.chdir('/'); return turn", None),
    "changes_the_message": ("message.clear(); return turn", None),
}
# Faults of code: the first failure stops the run (docs/environments.md).
_WRONG_TYPES = (
    "no_turn",
    "none",
    "says_nothing",
    "reward_in_words",
    "no_messages",
    "speaks_for_the_policy",
)
_HEAD = """import ctypes, os, signal, subprocess, sys, threading, time
from aligner.environments import Start, Turn
from aligner.examples.tasks.games import GuessingGame

BAD, AT, MARKER = {bad}, {at}, {marker!r}

class Strange(Exception):
    def __str__(self): raise RuntimeError('no text')

def again(): return again()

def forever():
    while True: yield {{'role': 'user', 'content': 'x' * 2**16}}

class Game(GuessingGame):
    def __init__(self, *, number, **given):
        super().__init__(**given)
        self.number, self.steps = number, 0

    def init(self):
        return self.said(super().init(), None)

    def step(self, message):
        self.steps += 1
        turn = super().step(message)
        told = Turn(turn.messages, turn.reward, turn.done, {{'number': self.number}})
        return self.said(told, message)

    def said(self, turn, message):
        if self.number != BAD or self.steps != AT:
            return turn
        if MARKER:
            try: os.close(os.open(MARKER, os.O_CREAT | os.O_EXCL))
            except FileExistsError: return turn
        return self.fault(turn, message or {{}})

    def fault(self, turn, message):
        """
_GAMES = 8
_RETRIES = 2
_MOST_OUTPUT = 100_000
_LONGEST_S = 90.0
_KILLS = 10


def run_campaign(campaign: Campaign) -> None:
    """Run undisturbed first, then with faults, and with kills at any moment."""
    calm, _, outcome = played(campaign, "calm", "return turn", at=-1)
    campaign.record("undisturbed", outcome.status == 0 and len(calm) == _GAMES, outcome.verdict)
    if outcome.status:
        return
    cases: list[tuple[str, str]] = [(name, "once") for name in _FAULTS]
    cases += [(name, "always") for name, (_, reason) in _FAULTS.items() if reason is not None]
    cases += [("", "kills")] * 5
    for name, how in campaign.while_time(cases):
        if how == "kills":
            _kill_from_outside(campaign)
        elif how == "once":
            _meet_once(campaign, name, calm)
        else:
            _meet_always(campaign, name)


def _meet_once(campaign: Campaign, name: str, calm: dict[int, Any]) -> None:
    body, reason = _FAULTS[name]
    bad, at = campaign.rng.randrange(_GAMES), campaign.rng.randint(0, 3)
    marker = campaign.folder / f"{name}.met"
    marker.unlink(missing_ok=True)
    samples_seen, counted, outcome = played(
        campaign, name, body, bad=bad, at=at, marker=str(marker)
    )
    undisturbed = [number for number in calm if number != bad or reason is None]
    unchanged = all(samples_seen.get(number) == calm[number] for number in undisturbed)
    expected = {_ERROR: 0, _TIMEOUT: 0} | ({} if reason is None else {reason: 1})
    good = outcome.status == 0 and not outcome.survivors and marker.exists()
    good = good and unchanged and len(samples_seen) == _GAMES and counted == expected
    good = good and (len(outcome.output) < _MOST_OUTPUT or name == "prints_much")
    good = good or _is_refused(outcome, name, at)
    note = f"call {at}: {outcome.verdict}, {counted}, others the same {unchanged}"
    note += f", left {outcome.survivors}"
    campaign.record(f"{name} once", good, f"{note}; {outcome.last if outcome.status else ''}")


def _meet_always(campaign: Campaign, name: str) -> None:
    body, _ = _FAULTS[name]
    at = campaign.rng.randint(0, 3)
    _, _, outcome = played(campaign, name, body, bad=campaign.rng.randrange(_GAMES), at=at)
    named = f"{_RETRIES + 1} conversations or engine calls failed" in outcome.output
    good = outcome.status == 2 and not outcome.timed_out and not outcome.survivors and named
    good = good or _is_refused(outcome, name, at)
    note = f"call {at}: {outcome.verdict} in {outcome.seconds:.0f} s, left {outcome.survivors}"
    campaign.record(f"{name} always", good, f"{note}; {outcome.last}")


def _is_refused(outcome: Outcome, name: str, at: int) -> bool:
    """Whether the first failure stopped the run, as it must for wrong types and errors of init."""
    is_named = f"{name}.py:Game' raised" in outcome.output
    stops = at == 0 or name in _WRONG_TYPES
    return stops and outcome.status == 2 and is_named and not outcome.survivors


def played(
    campaign: Campaign, name: str, body: str, *, bad: int = -1, at: int, marker: str = ""
) -> tuple[dict[int, Any], dict[str, int], Outcome]:
    """Run one step. Return conversations by number, the number of failures, and the outcome."""
    # A secret that is not guessed: every conversation has its three turns.
    rows = "".join(f'{{"secret": 99, "number": {n}}}\n' for n in range(_GAMES))
    (campaign.folder / "rows.jsonl").write_text(rows)
    file, folder = campaign.folder / f"{name}.py", campaign.fresh(name)
    file.write_text(_HEAD.format(bad=bad, at=at, marker=marker) + body + "\n")
    arguments = [*_arguments(campaign, folder), f"environment.factory={file}:Game"]
    outcome = run(campaign, "train_gpt_ppo", arguments, timeout_s=_LONGEST_S)
    if outcome.status:
        return {}, {}, outcome
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    lines = _metrics(folder)
    counted = {
        reason: int(sum(line.get(f"train_rollouts/failed_{reason}", 0) for line in lines))
        for reason in (_ERROR, _TIMEOUT)
    }
    return {sample["turns"][0]["info"]["number"]: sample for sample in samples}, counted, outcome


def _kill_from_outside(campaign: Campaign) -> None:
    """Send SIGKILL, SIGTERM and SIGSTOP to environment processes at random moments."""
    folder = campaign.fresh("kills")
    arguments = [
        *_arguments(campaign, folder, steps=4),
        "environment.factory=campaigns.slow_game:SlowGame",
        *("+environment.kwargs.seconds=0.05", "environment.retries=100"),
    ]
    life = Run("train_gpt_ppo", arguments, log=campaign.folder / "kills.log")
    hurt = 0
    while not life.poll() and hurt < _KILLS:
        time.sleep(campaign.rng.uniform(0.02, 0.5))
        hurt += _hurt(life.pid, campaign.rng)
    outcome = life.finish(_LONGEST_S)
    failed = sum(
        line.get(f"train_rollouts/failed_{reason}", 0)
        for line in (_metrics(folder) if outcome.status == 0 else [])
        for reason in (_ERROR, _TIMEOUT)
    )
    good = outcome.status == 0 and not outcome.survivors and 0 < failed <= hurt
    note = f"{hurt} were hurt, {failed:.0f} conversations begun again: {outcome.verdict}"
    campaign.record(
        "killed from outside", good, f"{note}, left {outcome.survivors}; {outcome.last}"
    )


def _hurt(driver: int, rng: random.Random) -> int:
    """Send a signal to one environment process and return the number of signalled processes."""
    children = []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(driver).children():
            with contextlib.suppress(psutil.Error):
                if "aligner.environments.worker" in process.cmdline():
                    children.append(process)
    if len(children) < 2:  # the first must come to life: by it the class is checked
        return 0
    with contextlib.suppress(psutil.Error):
        victim = rng.choice(sorted(children, key=lambda process: process.pid))
        ways = [signal.SIGKILL, signal.SIGTERM]
        if time.time() - victim.create_time() > 2:  # a start has minutes, not environment.timeout_s
            ways.append(signal.SIGSTOP)
        victim.send_signal(rng.choice(ways))
    return 1


def _metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _arguments(campaign: Campaign, folder: Path, steps: int = 1) -> list[str]:
    return [
        *("--config-name", "recipes/ppo_tiny_guessing_cpu"),
        *(f"model.restore_from_path={TINY}", f"exp_manager.explicit_log_dir={folder}"),
        *("exp_manager.create_tensorboard_logger=false", "exp_manager.samples_per_step=8"),
        *(f"trainer.ppo.max_steps={steps}", "trainer.ppo.val_check_interval=0"),
        *(f"model.ppo.num_rollout_samples={_GAMES}", "model.global_batch_size=8"),
        *("model.micro_batch_size=8", "critic.global_batch_size=8", "critic.micro_batch_size=8"),
        *(f"data.train.source={campaign.folder / 'rows.jsonl'}", "~data.train.arguments"),
        *("trainer.ppo.max_epochs=99", "data.validation=null", "environment.concurrency=4"),
        *("environment.timeout_s=3", f"environment.retries={_RETRIES}"),
        "environment.memory_mb=512",
    ]
