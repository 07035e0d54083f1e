"""Everything that a first session on a GPU runs, in order. One failure loses nothing.

    python -m benchmarks.gpu                  # all parts
    python -m benchmarks.gpu cost rates       # some of them
    python -m benchmarks.gpu --device dry cost large   # what is counted without a GPU

Every command is a separate process with a time limit, and so has every part. Lines of JSON go to
``OUT/results.jsonl``, everything else that is printed to ``OUT/log.txt``. At the end stands which
commands failed. The status is not 0 where one did. Results of ``--device dry`` are put beside those
of a GPU, as ``predicted``.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import ROOT, log, with_repository
from benchmarks.gpu.machine import DEVICES, PREDICTED
from benchmarks.shapes import SHAPES

_DRY_LIMIT_S = 900  # of one command, on a machine that may have other work
PYTEST = "pytest"  # the entry that is not a benchmark
# By part: seconds that it may take in all, and its commands, each with its own limit.
PARTS: dict[str, tuple[int, list[tuple[int, str]]]] = {
    "truth": (360, [(360, PYTEST)]),
    "cost": (
        480,
        [
            (120, "update --tokens 8192 --profile"),
            (120, "update --tokens 16384"),
            (120, "update --tokens 8192 --role critic"),
            (120, "update --tokens 8192 --recompute full"),
            (90, "head --tokens 8192 --profile"),
            (180, "generation --in-flight 16 64 256 512"),
            (90, "refit"),
            (90, "offload"),
            (150, "save"),
        ],
    ),
    "rates": (180, [(180, "rates")]),
    "large": (
        300,
        [
            (150, "update --shape qwen2.5-7b --tokens 4096 --recompute full"),
            (150, "offload --shape qwen2.5-7b"),
        ],
    ),
}
TESTS = ("-m", "pytest", "-m", "gpu", "tests/gpu", "-q", "-s", "-rA")


def command_of(text: str, options: argparse.Namespace) -> list[str]:
    """Return the command of one entry of `PARTS`."""
    if text == PYTEST:
        return [sys.executable, *TESTS]
    name, *arguments = text.split()
    if options.shape is not None and "--shape" not in arguments:
        arguments += ["--shape", options.shape]
    arguments += ["--device", options.device, "--card", options.card]
    return [sys.executable, "-m", f"benchmarks.gpu.{name}", *arguments]


def run(text: str, limit_s: float, options: argparse.Namespace) -> dict[str, object]:
    """Run one command. Its lines are written immediately."""
    command = command_of(text, options)
    start = time.monotonic()
    with (options.out / "log.txt").open("a") as output:
        output.write(f"\n=== {text}\n")
        output.flush()
        into_log = text == PYTEST
        try:
            completed = subprocess.run(
                command,
                cwd=ROOT,
                env=with_repository(),
                stdout=output if into_log else subprocess.PIPE,
                stderr=output,
                text=True,
                timeout=limit_s,
                check=False,
            )
            code, printed = completed.returncode, completed.stdout or ""
        except subprocess.TimeoutExpired as late:
            code, raw = 124, late.stdout or b""  # bytes, whatever the mode
            printed = raw.decode() if isinstance(raw, bytes) else raw
        lines = [line for line in printed.splitlines() if line.startswith("{")]
        output.write("".join(f"{x}\n" for x in printed.splitlines() if x not in lines))
    with (options.out / "results.jsonl").open("a") as results:
        results.write("".join(f"{line}\n" for line in lines))
    return {"command": text, "status": code, "seconds": round(time.monotonic() - start, 1)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all")
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="default: each command's own")
    parser.add_argument("--card", default="h200", help="of plan's table, whose times are predicted")
    parser.add_argument("--out", type=Path, help="default: results/ or dry/ in this folder")
    options = parser.parse_args(arguments)
    dry = options.device == "dry"
    options.out = options.out or (PREDICTED.parent if dry else Path(__file__).parent / "results")
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    ended = []
    for part in options.parts or [name for name in PARTS if not (dry and name == "truth")]:
        seconds, commands = PARTS[part]
        deadline = time.monotonic() + seconds
        for limit, text in commands:
            remaining_s = _DRY_LIMIT_S if dry else min(limit, deadline - time.monotonic())
            if remaining_s < 1:
                ended.append({"command": text, "status": "no time left", "seconds": 0.0})
                continue
            ended.append(run(text, remaining_s, options))
            log(json.dumps(ended[-1]))
    print(json.dumps({"benchmark": "gpu", "device": options.device, "commands": ended}))
    return int(any(result["status"] != 0 for result in ended))


if __name__ == "__main__":
    sys.exit(main())
