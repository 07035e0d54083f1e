"""Environments of a user's own, for the tests; copied to a file outside of every package."""

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

from aligner.environments import Start, Turn
from aligner.environments.tools import ToolEnv


class Echo:
    """Says back what it hears; done after ``turns`` of them, each worth its number."""

    def __init__(self, seed, turns=3, pids=None, **columns):
        self.seed, self.turns, self.said, self.columns = seed, turns, 0, columns
        if pids:
            with open(pids, "a") as file:
                file.write(f"{os.getpid()}\n")

    def init(self):
        return Start([{"role": "user", "content": f"row {self.columns.get('name')}"}])

    def step(self, message):
        self.said += 1
        heard = {"role": "user", "content": f"you said {len(message['content'])}"}
        done = self.said == self.turns
        return Turn([] if done else [heard], float(self.said), done, {"seed": self.seed})


class Async(Echo):
    """The same in coroutines that share a loop."""

    async def init(self):
        import asyncio

        self.loop = asyncio.get_running_loop()
        return Echo.init(self)

    async def step(self, message):
        import asyncio

        assert asyncio.get_running_loop() is self.loop
        await asyncio.sleep(0.001)
        return Echo.step(self, message)

    async def close(self):
        self.loop = None


def open_files():
    """Numbers of the process's open files but for the three standard ones."""
    return sorted(int(name) for name in os.listdir("/dev/fd") if int(name) > 2)


def write_all(data):
    """Write to every open file, so to the socket of the parent."""
    for number in open_files():
        with contextlib.suppress(OSError):
            os.write(number, data)


class Does(Echo):
    """Does in ``step`` what the row's column ``what`` says, beginning with turn ``at``."""

    def step(self, message):
        what = self.columns.get("what")
        turn = super().step(message)
        if self.said >= (self.columns.get("at") or 1) and what is not None:
            return getattr(self, what)(turn)
        return turn

    def raises(self, turn):
        raise ZeroDivisionError("of the environment")

    def hangs(self, turn):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(self.columns["marker"], "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        time.sleep(600)

    def dies_alone(self, turn):
        """Dies, and leaves a grandchild in a session of its own that ignores signals."""
        program = (
            "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
            "signal.signal(signal.SIGHUP, signal.SIG_IGN); print(os.getpid(), flush=True);"
            "time.sleep(600)"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE
        )
        with open(self.columns["marker"], "w") as file:
            file.write(child.stdout.readline().decode())
        os.kill(os.getpid(), signal.SIGKILL)

    def forks_many(self, turn):
        """Twenty children in sessions of their own, each with a child; then it hangs."""
        marker = Path(self.columns["marker"])
        marker.touch()
        for _ in range(20):
            if os.fork() == 0:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.fork()
                with marker.open("a") as file:
                    file.write(f"{os.getpid()}\n")
                time.sleep(600)
        while len(marker.read_text().split()) < 40:
            time.sleep(0.01)
        time.sleep(600)

    def closes_its_pipe(self, turn):
        os.closerange(3, max(open_files()) + 1)
        return turn

    def writes_half_an_answer(self, turn):
        """The header of an answer, and nothing behind it."""
        write_all(struct.pack("!4sQ", b"\x93ALN", 1000))
        time.sleep(600)

    def writes_bytes_of_an_answer(self, turn):
        """The header, then a byte every now and then."""
        write_all(struct.pack("!4sQ", b"\x93ALN", 10**6))
        while True:
            write_all(b"x")
            time.sleep(0.0005)

    def repeats(self, turn):
        """Answers to an earlier message, again and again."""
        body = json.dumps([1, "answer", None]).encode()
        while True:
            write_all(struct.pack("!4sQ", b"\x93ALN", len(body)) + body)
            time.sleep(0.0005)

    def answers_in_parts(self, turn):
        value = {**vars(turn), "info": {"x": "y" * 2**22}}
        body = json.dumps([2, "answer", value]).encode()
        whole = struct.pack("!4sQ", b"\x93ALN", len(body)) + body
        for begin, end in ((0, 5), (5, 12), (12, 100), (100, 2**21), (2**21, None)):
            write_all(whole[begin:end])
            time.sleep(0.2)
        time.sleep(600)

    def writes_everywhere(self, turn):
        write_all(b"junk that is no answer")
        return turn

    def eats_memory(self, turn):
        found = [bytearray(2**24) for _ in range(64)]
        return turn if found else None

    def is_killed(self, turn):
        os.kill(os.getpid(), signal.SIGKILL)

    def floods(self, turn):
        return Turn([{"role": "user", "content": "x" * 2**25}])

    def forks(self, turn):
        os.fork()
        return turn

    def is_no_turn(self, turn):
        return {"messages": []}

    def is_no_number(self, turn):
        return Turn([{"role": "user", "content": "a"}], float("nan"))

    def has_a_step_outside(self, turn):
        return Turn(turn.messages, 1.0, steps=[(2, 0.5), (6, 1.0)])


class Tools(ToolEnv):
    """Has a tool that does what `Does` does, in a thread of its own."""

    def __init__(self, seed, **columns):
        super().__init__([self.misbehave], "plain")
        self.columns = columns

    def question(self):
        return "?"

    def misbehave(self, how: str) -> str:
        """Do something.

        Args:
            how: Name of the method.
        """
        return getattr(Does, how)(self, None)


class Closes(Echo):
    """Writes to ``marker`` who was closed, and raises."""

    def close(self):
        with open(self.columns["marker"], "a") as file:
            file.write(f"{self.seed} ")
        raise RuntimeError("in close")


class FailsTwice(Echo):
    """The first two that are made raise; ``marker`` counts."""

    def step(self, message):
        path = self.columns["marker"]
        with open(path, "a") as file:
            file.write("x")
        if os.path.getsize(path) <= 2:
            raise RuntimeError("not yet")
        return super().step(message)


class NoStep:
    def __init__(self, seed):
        pass

    def init(self):
        return Start([])
