"""The benchmarks start from the functions that a run uses, so they must still fit these."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_one_side_of_the_ppo_step_is_measured():
    options = "--only aligner --layers 1 --hidden 64 --vocab 256 --steps 1 --threads 1 --json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ppo_step", *options.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert result["median_step_s"] > 0.0
    assert result["maxrss_MB"] > 0.0
