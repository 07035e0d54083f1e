"""Check a run's metrics against thresholds.

python examples/check_metrics.py results/gsm8k --step 40 \\
    "train_rollouts/rewards > 0.75" "val_rollouts/accuracy > 0.65"

The exit status is 0 if all conditions hold, 1 if one fails, and 2 if the step or a metric is
missing.
"""

import argparse
import operator
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from aligner.errors import AlignerError, ConfigError, DataError
from aligner.observe.jsonl import read_lines

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(r"\s*([\w/@.-]+)\s*(>=|<=|>|<)\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*")


@dataclass(frozen=True)
class Condition:
    """A comparison of a metric with a number."""

    metric: str
    sign: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Parse text such as ``metric > number``. A `ConfigError` shows the syntax."""
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise ConfigError(
                f'{text!r}: not a condition. Write it as "val_rollouts/accuracy > 0.65", with an '
                f"operator of {' '.join(_OPERATORS)}"
            )
        return cls(match[1], match[2], float(match[3]))

    def holds(self, value: float) -> bool:
        """Return whether ``value`` satisfies the condition. NaN never does."""
        return _OPERATORS[self.sign](value, self.bound)


def metrics_at(folder: Path, step: int) -> Mapping[str, float]:
    """Return the metrics of a step in ``folder/metrics.jsonl``.

    Raises:
        DataError: the file or the step is missing.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise DataError(f"{path} does not exist. Give the directory of a run")
    lines = {line["step"]: line for line in read_lines(path)}
    if step not in lines:
        last = f"The last step is {max(lines)}" if lines else "The file has no steps"
        raise DataError(f"{path} has no step {step}. {last}")
    return lines[step]


def check(folder: Path, step: int, conditions: list[Condition]) -> bool:
    """Print every condition with the measured value, and return whether all conditions hold."""
    measured = metrics_at(folder, step)
    for condition in conditions:
        if condition.metric not in measured:
            raise DataError(
                f"step {step} has no {condition.metric}. Metrics of validation exist for the steps "
                "of validations (val_check_interval)"
            )
    # All conditions are printed, also after one that fails.
    results = []
    for condition in conditions:
        value = float(measured[condition.metric])
        results.append(condition.holds(value))
        word = "holds" if results[-1] else "fails"
        print(f"{word}: {condition.metric} = {value:g} {condition.sign} {condition.bound:g}")
    return all(results)


def main() -> None:
    """Parse the command line and check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="directory of a run")
    parser.add_argument("conditions", nargs="+", help='such as "train_rollouts/rewards > 0.75"')
    parser.add_argument("--step", type=int, required=True, help="the step to check")
    arguments = parser.parse_args()
    try:
        conditions = [Condition.parse(text) for text in arguments.conditions]
        all_hold = check(arguments.run, arguments.step, conditions)
    except AlignerError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0 if all_hold else 1)


if __name__ == "__main__":
    main()
