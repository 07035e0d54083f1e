"""Environments of a user's own, for the tests; copied to a file outside of every package."""

import os
import signal
import subprocess
import sys
import time

from aligner.environments import Start, Turn


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

    def says_nothing(self, turn):
        return Turn()

    def is_not_scored(self, turn):
        return Turn(turn.messages, None, turn.done)


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
