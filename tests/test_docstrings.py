"""Docstrings state the shapes of tensors, by the syntax tree of every module."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from test_layering import modules, name_of, relative

# A dimension: a name, a number or ``...``, or several with an operator: ``S / CP``, ``R + 2``.
_TERM = r"[`(]*\w[\w()`]*"
_DIMENSION = rf"(?:\.\.\.|…|{_TERM}(?: ?(?:[-+*/]|or) ?{_TERM})*)"
SHAPE = re.compile(
    rf"(?<![\w\]])\[{_DIMENSION}(?:,\s*{_DIMENSION})*\]|\bscalars?\b|\bany\s+shape\b", re.IGNORECASE
)
# "as in `name`", "see `name`": the shape is said there.
REFERENCE = re.compile(r"\b(?:see|as(?:\s+in)?|same\s+as|inverse\s+of)\s+`([\w.]+)`", re.IGNORECASE)
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Place(NamedTuple):
    """Something with a docstring: ``module``, and the names down to it (none: the module)."""

    module: str
    names: tuple[str, ...]
    node: ast.Module | Definition
    line: str  # file and number, for messages


@cache
def sources() -> dict[str, list[str]]:
    return {name_of(path): path.read_text().splitlines() for path in modules()}


@cache
def places() -> list[Place]:
    """Modules, and the classes and functions in them that are not inside a function."""

    def within(body: list[ast.stmt], names: tuple[str, ...]) -> Iterator[Place]:
        for node in body:
            if isinstance(node, Definition):
                found = (*names, node.name)
                yield Place(module, found, node, f"{relative(path)}:{node.lineno}")
            if isinstance(node, ast.ClassDef):
                yield from within(node.body, (*names, node.name))
            elif isinstance(node, ast.If | ast.Try):
                yield from within(node.body, names)

    found = []
    for path in modules():
        module, tree = name_of(path), ast.parse(path.read_text())
        found += [Place(module, (), tree, relative(path)), *within(tree.body, ())]
    return found


def is_public(place: Place) -> bool:
    *outer, last = (*place.module.split("."), *place.names)
    return not any(name.startswith("_") for name in outer) and (
        not last.startswith("_") or last in ("__init__", "__call__")
    )


def takes_tensor(place: Place) -> bool:
    """Whether a parameter, or a field of a class, is of a type that mentions a tensor."""
    node = place.node
    if isinstance(node, ast.ClassDef):
        return bool(tensor_fields(node))
    if isinstance(node, ast.Module):
        return False
    given = node.args
    parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return any(each is not None and mentions_tensor(each.annotation) for each in parameters)


def mentions_tensor(annotation: ast.expr | None) -> bool:
    return annotation is not None and bool(re.search(r"\bTensor\b", ast.unparse(annotation)))


def tensor_fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [
        each
        for each in node.body
        if isinstance(each, ast.AnnAssign) and mentions_tensor(each.annotation)
    ]


def words_of(place: Place) -> str:
    """Docstring; of a class with the comments beside its fields, of a constructor the class's."""
    words = [ast.get_docstring(place.node) or ""]
    if isinstance(place.node, ast.ClassDef):
        lines = sources()[place.module]
        words += [
            comment
            for field in tensor_fields(place.node)
            for line in lines[field.lineno - 1 : field.end_lineno]
            for comment in line.partition("#")[2:]
        ]
    elif place.names and place.names[-1] in ("__init__", "__call__"):
        owner = place.names[:-1]
        words += [
            ast.get_docstring(each.node) or ""
            for each in places()
            if (each.module, each.names) == (place.module, owner)
        ]
    return "\n".join(words)


def test_every_tensor_argument_has_a_shape():
    taking = [place for place in places() if is_public(place) and takes_tensor(place)]
    assert len(taking) > 300  # the rule below is about something
    known = {name for place in places() for name in place.names}

    def states_shape(place: Place) -> bool:
        """Whether a shape stands there, or a reference to a docstring, which is checked too."""
        words = words_of(place)
        references = (name.rpartition(".")[2] for name in REFERENCE.findall(words))
        return bool(SHAPE.search(words)) or any(name in known for name in references)

    lacking = [place for place in taking if not states_shape(place)]
    assert [f"{place.line}: {'.'.join(place.names)}" for place in lacking] == []
