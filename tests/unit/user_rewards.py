"""Reward functions as a user writes them, good and bad; copied, and loaded from the copy."""

import asyncio
import contextlib
import multiprocessing
import os
import struct
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from aligner.errors import RewardError


def lengths(prompts, responses, ground_truths):
    return [len(r) for r in responses]


async def slowly(prompts, responses, ground_truths):
    await asyncio.sleep(0.01)
    return [float(r == g) for r, g in zip(responses, ground_truths, strict=True)]


def detailed(prompts, responses, ground_truths, **columns):
    assert set(columns) == {"level", "is_end"}, columns
    return [
        {"reward": level, "ended": ended, "n": len(prompts)}
        for level, ended in zip(columns["level"], columns["is_end"], strict=True)
    ]


def picky(prompts, responses, ground_truths, level, *, scale, other=None):
    assert other is None
    return [one * scale for one in level]


def divides(prompts, responses, ground_truths):
    return [1 / int(r) for r in responses]


def only_whole_batches(prompts, responses, ground_truths):
    if len(prompts) > 1:
        raise RuntimeError("too many")
    return [0.0]


def fails_then_hangs(prompts, responses, ground_truths):
    if len(prompts) == 1:
        time.sleep(1000)
    raise RuntimeError("first")


def hangs(prompts, responses, ground_truths):
    with open(ground_truths[0], "w") as file:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        file.write(f"{os.getpid()} {child.pid}")
    while True:
        time.sleep(1000)


def hangs_on_some(prompts, responses, ground_truths):
    while "hang" in responses:
        time.sleep(1000)
    return [{"reward": 1.0 + len(r), "n": 1.0} for r in responses]


def naps(prompts, responses, ground_truths):
    time.sleep(0.4)
    return [float(os.getpid())] * len(prompts)


class Odd(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Own(RewardError):
    pass


RAISED = {
    "base": BaseException("base"),
    "interrupt": KeyboardInterrupt(),
    "exit": GeneratorExit("g"),
    "odd": Odd(),
    "huge": ValueError("z" * 5_000_000),
    "own": Own("of my own"),
}


def raises(prompts, responses, ground_truths):
    for response in responses:
        if response in RAISED:
            raise RAISED[response]
    return [0.0] * len(prompts)


def returns_much(prompts, responses, ground_truths):
    return ["y" * 5_000_000] * len(prompts)


def writes_everywhere(prompts, responses, ground_truths):
    for number in range(3, 500):
        with contextlib.suppress(OSError):
            os.write(number, b"\0\0\0\5junk!")
    return [1.0] * len(prompts)


def too_few(prompts, responses):
    return []


not_callable = 3


def _square(value):
    return float(value * value)


def in_processes(prompts, responses, ground_truths, *, method):
    """Functions of this file in processes of a start method of multiprocessing."""
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return list(pool.map(_square, range(len(prompts))))


@dataclass(frozen=True)
class Truth:
    value: float


def truths(**_):
    yield {"prompt": "a", "ground_truth": Truth(2.0), "check": lambda text: text == "a"}


def of_truths(prompts, responses, ground_truths):
    return [truth.value for truth in ground_truths]


def takes_checks(prompts, responses, ground_truths, check):
    return [float(one(text)) for one, text in zip(check, responses, strict=True)]


def clashes(data_source, answer, truth, **columns):
    return [1.0] * len(data_source)


def integer_keys(prompts, responses, ground_truths):
    return [{"reward": 1.0, 3: 2.0} for _ in prompts]


def judge_is_down(prompts, responses, ground_truths):
    if len(prompts) > 1 or responses == ["always"]:
        raise ConnectionError("judge is down")
    raise ValueError("of one sample")


at_once = asyncio.Semaphore(1)


async def _limited(text):
    async with at_once:
        await asyncio.sleep(0.01)
        return float(len(text))


async def judged(prompts, responses, ground_truths):
    return await asyncio.gather(*map(_limited, responses))


class Hostile(str):
    """Runs code where it is unpickled."""

    def __reduce__(self):
        return os._exit, (7,)


def hostile_error(prompts, responses, ground_truths):
    raise ValueError(Hostile("\ud800"))


def forges(prompts, responses, ground_truths):
    """Writes an answer of its own to the channel, before the function's.

    The number of the channel is that which the parent's end happened to get.
    """
    form = responses[0].encode()
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            os.write(number, struct.pack("!4sQ", b"\x93ALN", len(form)) + form)
    return [1.0] * len(prompts)


def truths_in_columns(prompts, responses, **columns):
    return columns["ground_truths"]


def truths_by_keyword(prompts, responses, *, ground_truths):
    return ground_truths


def two_lists(prompts, responses):
    return [0.0] * len(prompts)
