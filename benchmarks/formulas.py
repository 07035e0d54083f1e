"""Our formulas against those of verl, OpenRLHF, TRL and NeMo-Aligner, on the same inputs.

    python -m benchmarks.formulas                    # print the table
    python -m benchmarks.formulas --peer verl --peer TRL
    python -m benchmarks.formulas --write docs/formulas.md   # counts and largest differences

In float64, values and gradients: both are to agree to 1e-6, or to differ by more where the table
explains how they differ. Exits with 1 otherwise, so the page stays true. Each peer's own functions
run in a process of their own, from an environment beside the repository that the first run makes
and nothing else sees; packages that a peer's module imports and its formulas do not use are
replaced by placeholders.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import gae, ppo_step
from benchmarks.common import ROOT, log, make_environment, read_json
from benchmarks.formulas_cases import LIMIT, Comparison

BEGIN = "<!-- made by benchmarks.formulas: begin -->"
END = "<!-- end -->"


class Peer(NamedTuple):
    """A peer and its environment. ``packages``: installed there without their dependencies."""

    name: str
    module: str
    folder: Path
    packages: Sequence[str] = ()


PEERS = [
    Peer("verl", "benchmarks.formulas_verl", gae.PEER, gae.PEER_PACKAGES),
    Peer(
        "OpenRLHF",
        "benchmarks.formulas_openrlhf",
        ROOT / ".venv-bench-openrlhf",
        ["openrlhf==0.11.2"],
    ),
    Peer("TRL", "benchmarks.formulas_trl", ppo_step.PEER),
    Peer(
        "NeMo-Aligner",
        "benchmarks.formulas_nemo_aligner",
        ROOT / ".venv-bench-nemo-aligner",
        ["nemo-aligner==0.7.0"],
    ),
]


def compare(peer: Peer) -> list[Comparison]:
    """All comparisons with one peer, in a process of its own."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if peer.packages:
        install(peer)
        python: Path | str = sys.executable
        environment["PYTHONPATH"] += f"{os.pathsep}{peer.folder}"
    else:
        python = make_environment(peer.folder, ppo_step.PEER_PACKAGES)
    found = read_json(python, peer.module, [], environment, timeout_s=600)["found"]
    return [Comparison(**entry) for entry in found]


def install(peer: Peer) -> None:
    """Put a peer's packages into its folder, once."""
    if peer.folder.is_dir():
        return
    log(f"making {peer.folder.name}: {', '.join(peer.packages)}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--target", str(peer.folder), *peer.packages]
    subprocess.run(command, check=True, timeout=600, stdout=sys.stderr)


def table(found: Sequence[Comparison]) -> Iterator[str]:
    """Yield Markdown: a row of agreeing formulas per peer, then formulas that should differ."""
    yield "| peer | formulas that agree |"
    yield "|---|---|"
    for peer in dict.fromkeys(entry.peer for entry in found):
        agreeing = [entry.formula for entry in found if entry.peer == peer and not entry.why]
        yield f"| {peer} | {'; '.join(agreeing)} |"
    yield ""
    yield "| formula | peer | difference | of gradients | how they differ |"
    yield "|---|---|---:|---:|---|"
    for entry in found:
        if entry.why:
            yield f"| {entry.formula} | {entry.peer} | {_numbers(entry)} | {entry.why} |"


def summary(found: Sequence[Comparison]) -> Iterator[str]:
    """Yield Markdown: counts of formulas per peer, and the largest differences where both agree."""
    yield "| peer | formulas that agree | formulas that differ | difference | of gradients |"
    yield "|---|---:|---:|---:|---:|"
    for peer in dict.fromkeys(entry.peer for entry in found):
        compared = [entry for entry in found if entry.peer == peer]
        agreeing = [entry for entry in compared if not entry.why]
        values = max((entry.difference for entry in agreeing), default=0.0)
        gradients = max((entry.gradient or 0.0 for entry in agreeing), default=0.0)
        counts = f"{len(agreeing)} | {len(compared) - len(agreeing)}"
        yield f"| {peer} | {counts} | {_number(values)} | {_number(gradients)} |"


def _numbers(entry: Comparison) -> str:
    gradient = "" if entry.gradient is None else _number(entry.gradient)
    return f"{_number(entry.difference)} | {gradient}"


def _number(value: float) -> str:
    return f"{value:.0e}" if value else "0"


def write(page: Path, lines: Sequence[str]) -> None:
    """Replace the tables of ``page``."""
    text = page.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    page.write_text("\n".join([f"{before}{BEGIN}", "", *lines, "", f"{END}{after}"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [peer.name for peer in PEERS]
    parser.add_argument("--peer", action="append", choices=names, help="default: all of them")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace the tables in a page")
    arguments = parser.parse_args()
    wanted = [peer for peer in PEERS if peer.name in (arguments.peer or names)]
    found = [entry for peer in wanted for entry in compare(peer)]
    lines = list(summary(found))
    print("\n".join([*lines, "", *table(found)]))
    if arguments.write:
        write(arguments.write, lines)
    agreeing = [entry for entry in found if not entry.why]
    surprises = [entry for entry in found if not entry.as_expected]
    log(f"{len(agreeing)} to agree to {LIMIT}, {len(found) - len(agreeing)} to differ")
    for entry in surprises:
        log(f"NOT AS EXPECTED: {entry}")
    sys.exit(1 if surprises else 0)


if __name__ == "__main__":
    main()
