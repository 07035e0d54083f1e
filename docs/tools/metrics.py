"""Write the tables of docs/metrics.md from aligner/observe/metric_names.md.

    python -m docs.tools.metrics           report whether the page is up to date
    python -m docs.tools.metrics --write   write the page

The page gives each denominator that several metrics share a short name, and lists the names once.
One row contains the deviation, minimum and maximum of a metric. tests/test_docs.py compares the
page with this.
"""

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
REGISTRY = ROOT / "aligner" / "observe" / "metric_names.md"
PAGE = ROOT / "docs" / "metrics.md"
BEGIN, END = "<!-- made by docs.tools.metrics: begin -->", "<!-- end -->"
SHORT = {
    "mean over the step's samples": "samples",
    "mean over trained tokens of a global batch, then over the step's updates": "tokens",
    "mean over the step's optimizer updates": "updates",
    "mean over generated tokens that count (token_mask · sample_mask)": "generated tokens",
    "mean over generated tokens that count (token_mask · sample_mask); with "
    "trainer.ppo.timestep=turn over turns, each by the state before it": "tokens or turns",
    "counted tokens; with trainer.ppo.timestep=turn over turns, each by the state before it": (
        "tokens or turns, not a mean"
    ),
}


# Three adjacent rows.
SPREAD = re.compile(r"\| `(\w+)_std` \|.*\| (.*) \|\n\| `\1_min` .*\n\| `\1_max` .*")


def tables() -> str:
    """Return the registry's sections with short denominators, after the list of short names."""
    _, _, sections = REGISTRY.read_text(encoding="utf-8").partition("\n## ")
    meaning = "Unbiased standard deviation, smallest and largest value."
    row = rf"| `\1_std`, `\1_min`, `\1_max` | {meaning} | \2 |"
    text, used = SPREAD.sub(row, f"## {sections}".strip()), []
    for over, name in sorted(SHORT.items(), key=lambda entry: -len(entry[0])):
        if f"| {over} |" in text:
            text = text.replace(f"| {over} |", f"| {name} |")
            used.append(f"| {name} | {over} |")
    names = "\n".join(["| over | full denominator |", "|---|---|", *reversed(used)])
    return f"{names}\n\n{text}"


def page(text: str) -> str:
    """Return the page with its tables replaced."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Report whether the page is up to date, or write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the page")
    write, text = parser.parse_args().write, PAGE.read_text(encoding="utf-8")
    if page(text) == text:
        print("docs/metrics.md is up to date")
    elif write:
        PAGE.write_text(page(text), encoding="utf-8")
    else:
        print("docs/metrics.md differs: run it with --write")


if __name__ == "__main__":
    main()
