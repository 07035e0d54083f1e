"""What the documentation tells a reader to type: its commands, tables, blocks and code spans."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
# Words that begin a command. A span or a line of a shell block that begins otherwise is none.
PROGRAMS = ("python", ".venv/bin/python", "torchrun", "aligner", "make", "pip", "docker", "sbatch")
ELLIPSES = ("...", "…")


@dataclass(frozen=True)
class Passage:
    """A part of ``page`` that begins at ``line``."""

    page: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Block(Passage):
    """A fenced block: ``line`` is that of its first line of text."""

    language: str
    text: str


@dataclass(frozen=True)
class Table(Passage):
    """A table: ``rows`` are the cells of each row as written."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Command(Passage):
    """A command line, continuation lines joined and comments removed."""

    text: str

    @property
    def words(self) -> list[str]:
        """The command without variables before it."""
        words = shlex.split(self.text)
        while words and re.match(r"[A-Z_0-9]+=", words[0]):
            words = words[1:]
        return words

    @property
    def is_open(self) -> bool:
        """Whether the page leaves a part of it to the reader."""
        return any(word in ELLIPSES for word in self.words)

    @property
    def script(self) -> str | None:
        """The name of the example that it runs, also by the command ``aligner``."""
        words = self.words
        if words[:1] == ["aligner"]:
            from aligner.commands import COMMANDS

            found = COMMANDS.get(words[1] if len(words) > 1 else "")
            return None if found is None else found.script
        for word in words:
            if re.fullmatch(r"examples/\w+\.py", word):
                return Path(word).stem
        return "train_gpt_ppo" if words[0] in ELLIPSES else None

    @property
    def arguments(self) -> list[str]:
        """What the script is given, without ellipses."""
        words = self.words
        begin = 2 if words[0] == "aligner" else 1
        for index, word in enumerate(words):
            if re.fullmatch(r"examples/\w+\.py", word):
                begin = index + 1
        # What stands in brackets may be left out, and is given here.
        given = (word.strip("[]") if "=[" not in word else word for word in words[begin:])
        return [word for word in given if word not in ELLIPSES]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def blocks() -> list[Block]:
    found = []
    for path in PAGES:
        text = path.read_text()
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start(2)) + 1
            found.append(Block(name_of(path), line, match[1], match[2]))
    return found


@cache
def tables() -> list[Table]:
    found = []
    for path in PAGES:
        lines = path.read_text().splitlines()
        for start, line in enumerate(lines):
            if start and re.fullmatch(r"\|[-|: ]+\|", line):
                below = takewhile(lambda line: line.startswith("|"), lines[start + 1 :])
                header = cells(lines[start - 1])
                found.append(Table(name_of(path), start, header, tuple(map(cells, below))))
    return found


def cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])


def prose(path: Path) -> str:
    """A page without its blocks, of the same length, so that lines can be counted."""
    return re.sub(
        r"^```.*?^```$",
        lambda block: re.sub(r"[^\n]", " ", block[0]),
        path.read_text(),
        flags=re.MULTILINE | re.DOTALL,
    )


def spans() -> Iterator[tuple[str, int, str]]:
    """Every inline code span as (page, line, text)."""
    for path in PAGES:
        text = prose(path)
        for match in re.finditer(r"(?<!`)`([^`]+)`(?!`)", text):
            yield (
                name_of(path),
                text.count("\n", 0, match.start()) + 1,
                " ".join(match[1].split()).replace("\\|", "|"),
            )


@cache
def commands() -> list[Command]:
    """Every command of the pages, of headers and footers in conf/, and of the scripts."""
    found = []
    for block in blocks():
        if block.language in ("sh", "bash"):
            found += shell_lines(block.page, block.line, block.text)
    for page, line, text in spans():
        if text.split()[0] in PROGRAMS and len(text.split()) > 1 and "%" not in text:
            found.append(Command(page, line, text))
    for path in sorted(CONF.rglob("*.yaml")):
        found += in_comments(path)
        footer = (yaml.safe_load(path.read_text()) or {}).get("hydra", {}).get("help", {})
        if "Examples" in footer.get("footer", ""):
            text = footer["footer"].split("Examples", 1)[1].split("\n\n", 1)[0]
            found += shell_lines(name_of(path), 1, text)
    for path in sorted((ROOT / "examples").rglob("*.py")):
        said = ast.get_docstring(ast.parse(path.read_text())) or ""
        found += shell_lines(name_of(path), 1, said, strict=False)
    for path in sorted((ROOT / "examples" / "slurm").glob("*.sbatch")):
        found += in_comments(path)
    return found


def in_comments(path: Path) -> list[Command]:
    comments = [
        re.sub(r"^#\s?(Launch:)?\s*", "", line) if line.startswith("#") else ""
        for line in path.read_text().splitlines()
    ]
    return shell_lines(name_of(path), 1, "\n".join(comments), strict=False)


def shell_lines(page: str, line: int, text: str, strict: bool = True) -> Iterator[Command]:
    """The commands of a shell block; not ``strict``: other lines stand between them."""
    joined, start = "", line
    for number, part in enumerate(text.splitlines(), line):
        start = start if joined else number
        joined = f"{joined} {part.strip()}".strip()
        if joined.endswith("\\"):
            joined = joined[:-1]
            continue
        first = re.sub(r"^([A-Z_0-9]+=\S+ )+", "", joined).split(" ")[0]
        if strict or first in PROGRAMS:
            words = shlex.split(joined, comments=True)
            if words:
                end = joined.find(" #") if " #" in joined else len(joined)
                yield Command(page, start, joined[:end].strip())
        joined = ""
