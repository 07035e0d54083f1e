"""The parity matrix: every number on every layout, padded, dynamic, packed and shared.

    python -m benchmarks.parity [--write docs/parity.md] [--limit 1e-5] [--keep FOLDER]

Starts real processes, at most four at a time. A cell is the largest relative difference from one
process with padded micro-batches and every row for itself (`difference`). Generation must give
identical tokens. The exit status is 1 when a cell is above the limit, differs, or could not be had
because processes failed. A layout that refuses something is a hole, named below the tables.
"""

import argparse
import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from aligner.checkpoint.nemo.model_file import save_nemo
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights
from benchmarks.common import ROOT, log

LIMIT = 1e-5
MODES = ("padded", "dynamic", "packed", "shared")
REFERENCES = {"shared": "separate"}  # of one process. Of the others: padded
MODELS = {
    "dense": TINY_ARCHITECTURE,
    "experts": dataclasses.replace(
        TINY_ARCHITECTURE, num_layers=2, num_moe_experts=4, moe_ffn_hidden_size=64, family="mixtral"
    ),
}
SCALE = 0.1  # of the random weights: with the usual 0.02 all tokens are nearly alike
NATS = ("kl", "logprob_gap")  # metrics that are differences of log-probs
BEGIN, END = "<!-- made by benchmarks.parity: begin -->", "<!-- end -->"


class Column(NamedTuple):
    """A layout: ``sizes`` are tensor, pipeline, context, sequence parallel and expert."""

    processes: int
    model: str
    sizes: str


ONE = Column(1, "dense", "1,1,1,0,1")
COLUMNS = {
    "1 process": ONE,
    "DP2": Column(2, "dense", "1,1,1,0,1"),
    "TP2": Column(2, "dense", "2,1,1,0,1"),
    "TP2+SP": Column(2, "dense", "2,1,1,1,1"),
    "PP2": Column(2, "dense", "1,2,1,0,1"),
    "CP2": Column(2, "dense", "1,1,2,0,1"),
    "EP2": Column(2, "experts", "1,1,1,0,2"),
    "TP2×PP2": Column(4, "dense", "2,2,1,0,1"),
    "TP2×DP2": Column(4, "dense", "2,1,1,1,1"),
    "CP2×TP2": Column(4, "dense", "2,1,2,1,1"),
}


class Cell(NamedTuple):
    """Text of a cell, whether it is within the limit, and the reason if it is a hole."""

    text: str
    good: bool = True
    reason: str | None = None


# Running ------------------------------------------------------------------------------------------


def run_all(folder: Path) -> dict[Column, dict[str, Any]]:
    """Return the results of every column by mode, or a sentence if its processes failed."""
    outputs: dict[Column, dict[str, Any]] = {}
    columns_to_run = [*COLUMNS.values(), *(ONE._replace(model=model) for model in MODELS)]
    for start in dict.fromkeys((column.processes, column.model) for column in columns_to_run):
        modes = (*MODES, *REFERENCES.values()) if start[0] == 1 else MODES
        columns = dict.fromkeys(column for column in columns_to_run if column[:2] == start)
        results = launch(folder, *start, [column.sizes for column in columns], modes)
        for column in columns:
            outputs[column] = {mode: results[f"{column.sizes},{mode}"] for mode in modes}
    return outputs


def launch(
    folder: Path, processes: int, model: str, sizes: Sequence[str], modes: Sequence[str]
) -> dict[str, Any]:
    """Start ``processes`` once for all their layouts, or read the results of an earlier start."""
    output, file = folder / f"{model}-{processes}.pt", folder / f"{model}.nemo"
    layouts = [f"{size},{mode}" for size in sizes for mode in modes]
    if not output.exists():
        write_model(model, file)
        log(f"{processes} processes, {model} model: {len(layouts)} layouts")
        completed = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(processes), "-m", "benchmarks.parity_worker"),
                *(str(file), str(output), *layouts),
            ],
            check=False,
            timeout=3600,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if completed.returncode:
            log(completed.stdout[-6000:])
            return dict.fromkeys(layouts, f"{processes} processes failed")
    return torch.load(output, weights_only=True)


def write_model(name: str, path: Path) -> None:
    """Write the tiny model with weights large enough that tokens differ."""
    if not path.exists():
        architecture = MODELS[name]
        weights = random_weights(architecture, scale=SCALE)
        save_nemo(path, weights, architecture, byte_level_tokenizer().files())


# Comparing ----------------------------------------------------------------------------------------


def difference(expected: Any, actual: Any, name: str = "") -> float:
    """Compute the largest relative difference, over all entries of a dict.

    Of a tensor: the largest absolute difference over the largest absolute value. Of a number:
    relative to it, or to 1e-3 where that is more (to 1 where it is a difference of log-probs,
    `NATS`): such a number is what terms of order 1 leave when they cancel.
    """
    if isinstance(expected, dict):
        if expected.keys() != actual.keys():
            return float("inf")
        return max(difference(value, actual[key], key) for key, value in expected.items())
    if isinstance(expected, torch.Tensor):
        if expected.shape != actual.shape:
            return float("inf")
        largest = expected.double().abs().max().clamp(min=1e-6)
        gap = ((expected.double() - actual.double()).abs().max() / largest).item()
    else:
        least = 1.0 if any(part in name for part in NATS) else 1e-3
        gap = abs(expected - actual) / max(abs(expected), least)
    return gap if gap == gap else float("inf")  # NaN is not an agreement


def cell(row: str, expected: Any, actual: Any, limit: float) -> Cell:
    """Return one cell. ``expected`` and ``actual``: results of `parity_worker`, or a sentence."""
    if isinstance(actual, str):
        return Cell("—", reason=actual)
    gap = difference(expected, actual)
    if row.endswith("generation"):
        return Cell("same" if gap == 0 else "differs", good=gap == 0)
    return Cell("0" if gap == 0 else f"{gap:.0e}", good=gap <= limit)


def table(
    outputs: dict[Column, dict[str, Any]], mode: str, limit: float, reasons: dict[str, int]
) -> tuple[list[str], int]:
    """Return the lines of one mode's table and its number of bad cells, and number ``reasons``."""
    columns = [name for name, column in COLUMNS.items() if (mode, column) != ("padded", ONE)]
    lines = [f"| {mode} | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    bad = 0
    for row in outputs[ONE]["padded"]:
        texts = []
        for name in columns:
            column = COLUMNS[name]
            reference = outputs[ONE._replace(model=column.model)][REFERENCES.get(mode, "padded")]
            sharded = outputs[column][mode]
            if isinstance(reference, str) or isinstance(sharded, str):
                texts.append("**failed**")
                bad += 1
                continue
            shown = cell(row, reference[row], sharded[row], limit)
            text = shown.text
            if shown.reason is not None:
                text += f" [{reasons.setdefault(shown.reason, len(reasons) + 1)}]"
            bad += not shown.good
            texts.append(text if shown.good else f"**{text}**")
        lines.append(f"| {row} | {' | '.join(texts)} |")
    return lines, bad


def report(outputs: dict[Column, dict[str, Any]], limit: float) -> tuple[str, int]:
    """Return the tables and the reasons of holes as Markdown, and the number of bad cells."""
    reasons: dict[str, int] = {}
    parts, bad = [], 0
    for mode in MODES:
        lines, wrong = table(outputs, mode, limit, reasons)
        parts.append("\n".join(lines))
        bad += wrong
    holes = [f"{number}. {reason}" for reason, number in reasons.items()]
    parts.append(
        "\n".join(["Cells without a value:", "", *holes]) if holes else "Every cell was measured."
    )
    return "\n\n".join(parts), bad


def summary(text: str) -> str:
    """Return two tables of the largest cells of ``text``, and the lines below its tables.

    ``text`` is the result of `report`. The first table has a row for each quantity, the second for
    each layout, and both have a column for each mode.
    """
    parts = text.split("\n\n")
    grids = {mode: _cells(part) for mode, part in zip(MODES, parts, strict=False)}
    quantities = list(grids[MODES[0]])
    header = f" | {' | '.join(MODES)} |\n|---|{'---:|' * len(MODES)}"
    rows = [f"| largest over layouts{header}"]
    for quantity in quantities:
        found = [_largest(grids[mode][quantity].values()) for mode in MODES]
        rows.append(f"| {quantity} | {' | '.join(found)} |")
    rows.append(f"\n| largest over quantities{header}")
    for layout in COLUMNS:
        found = [
            _largest(cells[layout] for cells in grids[mode].values() if layout in cells)
            for mode in MODES
        ]
        rows.append(f"| {layout} | {' | '.join(found)} |")
    return "\n\n".join(["\n".join(rows), *parts[len(MODES) :]])


def _cells(table: str) -> dict[str, dict[str, str]]:
    """Return the cells of a Markdown table by row and column."""
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
    ]
    return {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}


def _largest(cells: Iterable[str]) -> str:
    """Return the worst cell: bold (bad), then the largest number, "same", or "" without cells."""

    def rank(cell: str) -> tuple[bool, float]:
        number = cell.strip("*").split(" ")[0]
        return cell.startswith("**"), float(number) if number[:1].isdigit() else -1.0

    return max(cells, key=rank, default="")


def write_between_marks(path: Path, text: str) -> None:
    """Replace the text between the two marks of a page."""
    page = path.read_text()
    head, tail = page.split(BEGIN)
    _, foot = tail.split(END)
    path.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{foot}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="page whose tables are replaced")
    parser.add_argument("--limit", type=float, default=LIMIT, help="largest difference that passes")
    parser.add_argument("--keep", type=Path, help="keep results there, use those that are there")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        outputs = run_all(folder.resolve())
    if isinstance(outputs[ONE]["padded"], str):
        log("one process failed: nothing to compare with")
        return 1
    text, bad = report(outputs, options.limit)
    print(text)
    if options.write is not None:
        write_between_marks(options.write, summary(text))
    if bad:
        log(f"{bad} cells are above {options.limit:g}, differ or failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
