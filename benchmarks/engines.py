"""Cost of the Ray engine: the same PPO steps under Ray and under the local engine.

    python -m benchmarks.engines                 # needs models/tiny.nemo (make models/tiny.nemo)
    python -m benchmarks.engines --rounds 5 --steps 8

One worker per role, the tiny model, and a batch that makes a step of the local engine 2 s or more
on two cores: Ray adds its calls to a step, about twenty, and the batches that pass through its
object store. Both engines compute with the same number of threads, and must write the same metrics,
or the benchmark fails.

Each reading is a separate run, the way users start it. The engines take turns, ``--rounds``
times. A run's time is the median of ``timers/total`` over its steps after the first. An engine's
is the median of its runs. Mark (Ray over local): at most 1.15, of a step of 2 s or more.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, log, verdict

MARK = 1.15
LEAST_STEP_S = 2.0
ENGINES = ("local", "ray")


def main() -> None:
    """Measure and print one line of words, or of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each engine")
    parser.add_argument("--steps", type=int, default=6, help="steps of a run")
    parser.add_argument("--samples", type=int, default=512, help="sequences of a step")
    parser.add_argument("--length", type=int, default=48, help="tokens of a response")
    parser.add_argument("--json", action="store_true", help="print JSON instead of words")
    options = parser.parse_args()

    seconds: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    for number in range(options.rounds):
        lines = {}
        for engine in ENGINES:
            lines[engine] = run(engine, options)
            times = [line["timers/total"] for line in lines[engine][2:]]  # step 0 is not a step
            seconds[engine].append(statistics.median(times))
            log(f"round {number + 1}, {engine}: {seconds[engine][-1]:.3f} s a step")
        if without_times(lines["local"]) != without_times(lines["ray"]):
            sys.exit("the engines did not compute the same numbers; nothing to compare")
    local, ray = (statistics.median(seconds[engine]) for engine in ENGINES)
    result = {"local_s": local, "ray_s": ray, "ratio": ray / local, "mark": MARK}
    if options.json:
        print(json.dumps(result))
        return
    print(f"a step: local {local:.3f} s, ray {ray:.3f} s; {verdict('ratio', ray / local, MARK)}")
    if local < LEAST_STEP_S:
        print(f"a step is shorter than {LEAST_STEP_S:g} s here: raise --samples or --length")


def run(engine: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run a configuration and return its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "cluster.engine": engine,
            "exp_manager.explicit_log_dir": folder,
            "exp_manager.create_tensorboard_logger": "false",
            "exp_manager.save_nemo": "false",
            "trainer.ppo.max_steps": options.steps,
            "trainer.ppo.save_interval": 0,
            "trainer.ppo.val_check_interval": 0,
            "trainer.ppo.limit_val_prompts": 1,
            "model.ppo.num_rollout_samples": options.samples,
            "model.ppo.length_params.min_length": options.length,
            "model.ppo.length_params.max_length": options.length,
            "model.global_batch_size": options.samples,
            "critic.global_batch_size": options.samples,
            "data.train.arguments.size": options.samples * options.steps,
        }
        completed = subprocess.run(
            [
                *(sys.executable, str(ROOT / "examples" / "train_gpt_ppo.py")),
                *("--config-name", "recipes/ppo_tiny_cpu"),
                *(f"{key}={value}" for key, value in settings.items()),
            ],
            cwd=ROOT,
            # Under Ray a worker's threads are the cores its group shares. Be explicit for both.
            env={"OMP_NUM_THREADS": str(os.cpu_count()), **os.environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=3600,
        )
        if completed.returncode:
            sys.exit(completed.stdout)
        text = (Path(folder) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def without_times(lines: list[dict[str, Any]]) -> str:
    """Return everything except times as text (NaN is not equal to itself)."""
    untimed = [{k: v for k, v in line.items() if not k.startswith("timers/")} for line in lines]
    return json.dumps(untimed)


if __name__ == "__main__":
    main()
