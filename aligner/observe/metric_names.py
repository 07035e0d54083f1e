"""Metrics that the library writes: names, meanings and denominators, from ``metric_names.md``.

Only metrics of these tables, or with a free prefix, can be written. ``python -m
aligner.observe.metric_names`` prints all metrics as one table of full names.
"""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from aligner.errors import ConfigError


class MetricInfo(NamedTuple):
    """Meaning of a metric. ``over``: its denominator, or how values are combined."""

    meaning: str
    over: str = "one number"


def _read_tables(path: Path) -> tuple[dict[str, MetricInfo], dict[str, MetricInfo]]:
    """Read the metrics by full name, grouped in the order of the headings, and free prefixes."""
    groups: dict[str, dict[str, MetricInfo]] = {}
    prefixes: dict[str, MetricInfo] = {}
    section: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = re.findall(r"\w+", line.partition(":")[0])
        elif row := re.fullmatch(r"\| `(.+?)(\*?)` \| (.+) \| (.+) \|", line):
            name, star, meaning, over = row.groups()
            if star:
                prefixes[name] = MetricInfo(meaning, over)
                continue
            for group in section:
                groups.setdefault(group, {})[f"{group}/{name}"] = MetricInfo(meaning, over)
    return {name: info for group in groups.values() for name, info in group.items()}, prefixes


METRICS, PREFIXES = _read_tables(Path(__file__).with_suffix(".md"))


def describe(name: str) -> MetricInfo | None:
    """Return the meaning of a metric, or None if it is unknown."""
    if name in METRICS:
        return METRICS[name]
    return next((info for prefix, info in PREFIXES.items() if name.startswith(prefix)), None)


def check_names(names: Iterable[str]) -> None:
    """Raise `ConfigError` if a metric has no explanation."""
    for name in names:
        if describe(name) is None:
            near = difflib.get_close_matches(name, METRICS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigError(
                f"metric {name!r} has no explanation{hint} Add it to "
                f"aligner/observe/metric_names.md or use a prefix of {', '.join(PREFIXES)}"
            )


def markdown() -> str:
    """Return all metrics as a Markdown table for the documentation."""
    lines = ["| metric | meaning | over |", "|---|---|---|"]
    entries = {**METRICS, **{f"{prefix}*": info for prefix, info in PREFIXES.items()}}
    lines += [f"| `{name}` | {info.meaning} | {info.over} |" for name, info in entries.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
