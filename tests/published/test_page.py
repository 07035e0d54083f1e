"""docs/published.md: every file exists, and every published name is in the file that lists it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "published.md").read_text()
ENTRY = re.compile(r"^- `(aligner/[\w/]+\.py)`: (.+?)(?=\n- |\n\n)", re.MULTILINE | re.DOTALL)


def published_names():
    """Return (file, name) of every code span in the lists of names by file."""
    for file, names in ENTRY.findall(PAGE):
        for span in re.findall(r"`([^`]+)`", names):
            yield file, re.search(r"\w+", span)[0]


def test_every_name_is_in_its_file():
    entries = list(published_names())
    assert len(entries) > 120
    missing = [
        f"{file}: {name}"
        for file, name in entries
        if not re.search(rf"\b{name}\b", (ROOT / file).read_text())
    ]
    assert missing == []


def test_every_file_exists():
    files = set(re.findall(r"`((?:aligner|tests|conf|examples)/[\w./*-]+)`", PAGE))
    assert len(files) > 40
    assert [path for path in sorted(files) if not list(ROOT.glob(path.rstrip("/")))] == []
