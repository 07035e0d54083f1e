"""Docstrings are written for a terminal; these are the few forms that Markdown reads otherwise.

Griffe, which reads the sources for mkdocstrings, calls `TerminalForms` (mkdocs.yml names it).
"""

import re

from griffe import Extension, GriffeLoader, Object

RULE = re.compile(r"(=+)(?: +=+)+")
DRAWN = re.compile(r"[─│►▲▼◄┘└┐┌┬┴├]|\S {4,}\S")


class TerminalForms(Extension):
    """Tables between rules of ``=`` become Markdown's, drawings become blocks."""

    def on_object(self, *, obj: Object, loader: GriffeLoader, **kwargs: object) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None and not obj.is_alias:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """``text`` as Markdown."""
    made = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.split("\n")
        if RULE.fullmatch(lines[0].strip()):
            made.append(table(lines))
        elif not paragraph.startswith(" ") and any(map(DRAWN.search, lines)) and made:
            made.append("\n".join(f"    {line}" for line in lines))
        else:
            made.append(escaped(paragraph))
    return "\n\n".join(made)


def table(lines: list[str]) -> str:
    """Rows between two rules, whose widths are those of the columns; a first cell may be empty."""
    starts = [match.start() for match in re.finditer(r"=+", lines[0])]
    ends = [*starts[1:], None]
    rows: list[list[str]] = []
    for line in lines[1:]:
        if RULE.fullmatch(line.strip()):
            break
        cells = [line[start:end].strip() for start, end in zip(starts, ends, strict=True)]
        if cells[0]:
            rows.append(cells)
        else:
            rows[-1] = [" ".join(filter(None, pair)) for pair in zip(rows[-1], cells, strict=True)]
    header = ["| " * (len(starts)) + "|", "|---" * len(starts) + "|"]
    return "\n".join([*header, *("| " + " | ".join(row) + " |" for row in rows)])


def escaped(paragraph: str) -> str:
    """Prose without the marks of a terminal's.

    ``::`` before a block is one colon, or nothing where it stands alone. ``[rank][row]`` is an
    index; Markdown would look for a page of that name.
    """
    if paragraph.endswith("::"):
        paragraph = paragraph[:-1] if len(paragraph) > 2 else ""
    return paragraph.replace("][", "]\\[")
