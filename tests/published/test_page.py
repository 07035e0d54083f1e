"""docs/published.md: every file and test that it names is there, and its statuses are its own."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "published.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| item")
]


def test_every_row_says_what_it_is():
    assert len(ROWS) > 300
    assert [row for row in ROWS if len(row) != 4 or not row[1]] == []
    statuses = Counter(row[1] for row in ROWS)
    assert statuses["as published"] > 230


def test_what_is_not_as_published_says_why():
    free = ("as published", "accepted, or refused with ours", "refused with ours")
    silent = [row[0] for row in ROWS if not row[3].strip(" |") and not row[1].startswith(free)]
    assert silent == []


def test_every_file_is_there():
    named = re.findall(r"`((?:aligner|tests|docs|conf|examples|benchmarks)/[\w./*-]+)`", PAGE)
    assert len(set(named)) > 60
    assert [path for path in sorted(set(named)) if not list(ROOT.glob(path.rstrip("/")))] == []
