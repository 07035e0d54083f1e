"""Docstrings for the site: a terminal's forms in Markdown, and those of declared methods.

Griffe, which reads the sources for mkdocstrings, calls the extensions (mkdocs.yml names this file).
"""

import copy
import re
from collections.abc import Iterator

from griffe import (
    Attribute,
    Class,
    Docstring,
    ExprCall,
    Extension,
    Function,
    GriffeLoader,
    Module,
    Object,
    Parameters,
)

# Of `aligner.distributed.workers`: each makes a method of a handle from a method of its workers.
DECLARATIONS = ("on_all_workers", "phase", "scored_rows")
RULE = re.compile(r"(=+)(?: +=+)+")
DRAWN = re.compile(r"[─│►▲▼◄┘└┐┌┬┴├]|\S {4,}\S")


class TerminalForms(Extension):
    """Tables between rules of ``=`` become Markdown's, drawings become blocks."""

    def on_object(self, *, obj: Object, loader: GriffeLoader, **kwargs: object) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None and not obj.is_alias:
            obj.docstring.value = markdown(obj.docstring.value)


class DeclaredMethods(Extension):
    """What a handle declares in one line has signature and docstring of the workers' method."""

    def on_package(self, *, pkg: Module, loader: GriffeLoader, **kwargs: object) -> None:
        """Replace the attributes that are declarations by methods."""
        for owner, name, declaration in declarations(pkg):
            method = method_at(declaration.arguments[0].canonical_path, loader)
            assert method.docstring is not None, method.path
            found = owner.members[name]
            declared = Function(
                name,
                lineno=found.lineno,
                endlineno=found.endlineno,
                parameters=Parameters(*map(copy.copy, method.parameters)),
                returns=method.returns,
            )
            declared.docstring = Docstring(method.docstring.value, parent=declared)
            owner.set_member(name, declared)


def method_at(path: str, loader: GriffeLoader) -> Function:
    """The method of that path: inherited, or under another name, too."""
    found = loader.modules_collection[path]
    if found.is_alias:
        found = found.final_target
    return found if isinstance(found, Function) else method_at(found.value.canonical_path, loader)


def declarations(place: Module | Class) -> Iterator[tuple[Class, str, ExprCall]]:
    """Class, name and call of every declaration in ``place``."""
    for name, member in list(place.members.items()):
        if member.is_alias:
            continue
        if isinstance(member, Module | Class):
            yield from declarations(member)
        elif (
            isinstance(place, Class)
            and isinstance(member, Attribute)
            and isinstance(member.value, ExprCall)
            and str(member.value.function) in DECLARATIONS
        ):
            yield place, name, member.value


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
