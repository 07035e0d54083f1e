"""How long a user waits before anything happens.

    python -m benchmarks.startup

Prints one line of JSON: processor seconds of ``--help`` of the PPO script and of importing what PPO
needs, and seconds on the clock from starting the main job (`make ppo`) to its first sampled token.
Each reading is of a separate process, the better one of ``--rounds``. The first round also warms
the disk cache. Needs `models/smollm2-135m-instruct.nemo` (make models/smollm2-135m-instruct.nemo),
or another model as ``--model``.
"""

import argparse
import json
import os
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.common import ROOT, read_json

SCRIPT = ROOT / "examples" / "train_gpt_ppo.py"
MODEL = ROOT / "models" / "smollm2-135m-instruct.nemo"
AIMS = {"help_cpu_s": 1.0, "import_cpu_s": 6.0, "first_token_s": 12.0}


def processor_seconds(words: list[str]) -> float:
    """Measure user and system time of ``python words`` from start to end."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    start = spent()
    subprocess.run(
        [sys.executable, *words], check=True, cwd=ROOT, timeout=120, stdout=subprocess.DEVNULL
    )
    return spent() - start


def first_token(model: Path, recipe: str, folder: str, started: float) -> NoReturn:
    """Run the PPO script in this process up to the first token that is read back. Print the time.

    ``started``: `time.time` of whoever began this process, so that its own start counts.
    """
    from aligner.models.gpt.decode.scheduler import Rollout

    stdout = os.dup(1)
    os.dup2(2, 1)  # output of the run is not a result
    read = Rollout._read

    def until_read(self: Rollout, unread: int) -> None:
        waiting = len(self._unread)
        read(self, unread)
        if len(self._unread) < waiting:
            os.write(stdout, json.dumps({"first_token_s": time.time() - started}).encode())
            os._exit(0)

    Rollout._read = until_read  # type: ignore[method-assign]
    options = {"model.restore_from_path": model, "exp_manager.explicit_log_dir": folder}
    words = [f"{key}={value}" for key, value in options.items()]
    sys.argv = [str(SCRIPT), "--config-name", recipe, *words]
    sys.path[0] = str(SCRIPT.parent)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    raise SystemExit("the run ended without a sampled token")


def readings(model: Path, recipe: str) -> dict[str, float]:
    """Read each figure once."""
    with tempfile.TemporaryDirectory() as folder:  # whoever has its first token leaves at once
        arguments = ["--model", str(model), "--recipe", recipe, "--folder", folder]
        arguments += ["--started", str(time.time())]
        job = read_json(sys.executable, "benchmarks.startup", arguments, timeout_s=300)
    return {
        "help_cpu_s": processor_seconds([str(SCRIPT), "--help"]),
        "import_cpu_s": processor_seconds(["-c", "import aligner.algorithms.ppo.trainer"]),
        "first_token_s": job["first_token_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--recipe", default="recipes/ppo_smollm2_arithmetic_cpu")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.started is not None:
        first_token(arguments.model, arguments.recipe, arguments.folder, arguments.started)
    rounds = [readings(arguments.model, arguments.recipe) for _ in range(arguments.rounds)]
    best: dict[str, Any] = {name: round(min(timing[name] for timing in rounds), 2) for name in AIMS}
    print(json.dumps({**best, "aims": AIMS}))


if __name__ == "__main__":
    main()
