"""Credit of turns compared with credit of trajectories: the tiny model learns a game with both.

    python -m benchmarks.turn_credit [--model models/tiny.nemo] [--seeds 1 2 3 4 5] [--steps 100]

A conversation names eight numbers, each to be answered with the next larger one
(`aligner.examples.tasks.games.NextNumber`). A turn earns its own reward, and no turn depends on
another. RLOO compares what conversations earned from a turn on with ``credit=turn``, and all that
they earned with ``credit=trajectory``: there the rewards of earlier turns are in the advantage of a
turn, too, whose mean over conversations is 0 and whose variance is not. All else is the same. The
share of right answers is that of the training rollouts. Exits with 1 where turn credit is not
ahead, at the end, in the mean over seeds.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from aligner.config import load_config
from aligner.observe.metrics import read_metrics
from benchmarks.common import ROOT, log, stdout_reserved

CREDITS = ("turn", "trajectory")
LAST = 5  # steps whose mean is the end of a curve
Curves = Mapping[str, Sequence[Sequence[float]]]  # by credit: of every seed, by step
_GAMES = "aligner.examples.tasks.games"
# Messages and nothing around them: two tokens a turn, and a number precedes its answer.
_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
_SETTINGS = (
    "reward=environment",
    f"environment.factory={_GAMES}:NextNumber",
    f"data.train.source={_GAMES}:next_numbers",
    "environment.max_tokens=256",
    "environment.concurrency=16",
    "trainer.ppo.advantage.estimator=rloo",
    "trainer.ppo.val_check_interval=0",
    "trainer.ppo.save_interval=0",
    "model.micro_batch_size=32",
    "model.global_batch_size=32",
    "model.ppo.num_rollout_samples=32",
    "model.ppo.num_rollouts_per_prompt=8",
    "model.ppo.length_params.max_length=1",
    "model.optim.lr=3.0e-3",
    "exp_manager.create_tensorboard_logger=false",
    "exp_manager.save_nemo=false",
)


def settings_with(options: Sequence[str]) -> list[str]:
    """Return options of a run, ``key=value`` each: ``options`` override the game's options."""
    changed = {option.partition("=")[0] for option in options}
    return [item for item in _SETTINGS if item.partition("=")[0] not in changed] + list(options)


def curve(
    model: str, credit: str, seed: int, steps: int, options: Sequence[str] = ()
) -> list[float]:
    """Return the share of right answers in the rollout of each step of a run."""
    from aligner.algorithms.ppo.trainer import train_ppo

    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "plain.jinja"
        template.write_text(_TEMPLATE)
        settings = [
            *settings_with(options),
            f"environment.chat_template={template}",
            f"model.restore_from_path={Path(model).absolute()}",
            f"trainer.ppo.advantage.credit={credit}",
            f"trainer.ppo.max_steps={steps}",
            f"seed={seed}",
            f"exp_manager.explicit_log_dir={folder}/run",
        ]
        with initialize_config_dir(config_dir=str(ROOT / "conf"), version_base="1.3"):
            composed = compose("gpt_reinforce", overrides=settings)
        train_ppo(load_config(composed))
        lines: list[dict[str, Any]] = read_metrics(Path(folder) / "run" / "metrics.jsonl")
    return [line["train_rollouts/accuracy"] for line in lines if line["step"]]


MEASURES: Mapping[str, Callable[[Sequence[float]], float]] = {
    f"last {LAST} steps": lambda shares: statistics.fmean(shares[-LAST:]),
    "all steps": statistics.fmean,
}


def table(curves: Curves, seeds: Sequence[int]) -> str:
    """Return Markdown: share of right answers by credit and seed, and their mean."""
    rows = [
        f"| credit | {' | '.join(f'seed {seed}' for seed in seeds)} | mean |",
        f"|---|{'---:|' * (len(seeds) + 1)}",
    ]
    for name, measure in MEASURES.items():
        for credit, runs in curves.items():
            values = [measure(item) for item in runs]
            cells = [f"{value:.3f}" for value in (*values, statistics.fmean(values))]
            rows.append(f"| {credit}, {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def ahead(curves: Curves, measure: Callable[[Sequence[float]], float]) -> int:
    """Count the seeds in which turn credit yields more right answers."""
    pairs = zip(*(curves[credit] for credit in CREDITS), strict=True)
    return sum(measure(turn) > measure(trajectory) for turn, trajectory in pairs)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/tiny.nemo", help="the model to begin with")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=100, help="steps of a run")
    parser.add_argument("options", nargs="*", help="key=value: options of the runs")
    options = parser.parse_args()
    curves: dict[str, list[list[float]]] = {credit: [] for credit in CREDITS}
    with stdout_reserved():
        for seed in options.seeds:
            for credit in CREDITS:
                rewards = curve(options.model, credit, seed, options.steps, options.options)
                curves[credit].append(rewards)
                log(f"seed {seed}, {credit}: {' '.join(f'{share:.2f}' for share in rewards)}")
    print(f"{os.cpu_count()} CPU cores, {options.steps} steps\n\n{table(curves, options.seeds)}\n")
    for name, measure in MEASURES.items():
        count = ahead(curves, measure)
        print(f"{name}: turn credit is ahead with {count} of {len(options.seeds)} seeds")
    last = next(iter(MEASURES.values()))
    turn, trajectory = (statistics.fmean(map(last, curves[credit])) for credit in CREDITS)
    sys.exit(turn <= trajectory)


if __name__ == "__main__":
    main()
