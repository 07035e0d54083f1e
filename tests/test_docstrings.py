"""Docstrings state the shapes of tensors, open with a noun or a verb, and use the field's words.

The linter asks for a docstring of everything public. What it must hold is asserted here, from the
syntax tree of every module.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
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
OPENINGS = ("What", "Which", "Where", "Whether", "When", "Why", "Who", "Whose", "How", "Of")
# Words that earlier versions used, and the words of the field that replaced them.
RETIRED = {
    "front": "handle",
    "draw": "sample",
    "drawn ahead, overlap": "one-step off-policy prefetch",
    "properly ended": "terminated",
    "kept pass": "forward reuse: the log-prob pass serves as the training pass's forward",
    "residence": "offload",
    "held weights": "swapped weights",
    "lockstep": "expert synchronisation",
    "generation stages": "pipeline communication in decoding",
    "kept set": "top-k/top-p filter",
    "candidates": "top-k log-probs",
    "agreement": "collectives of Python objects",
    "guardian": "reaper: ends what a dead driver leaves behind",
    "liveness": "heartbeat",
    "role state": "sharded state",
    "signal": "reward variance inside a group",
    "charges KL": "KL in reward",
    "frame": "padded batch [B, S]",
    "lesson": "supervised recipe: data, loss and trainer of one algorithm",
    "teaching": "teacher's targets",
    "outcome": "result of a step",
    "facts": "summary",
    "settle": "drain: wait for what is in flight",
    "lodger, shared body": "shared-backbone reward model",
    "foreign responses": "mismatched completions (KTO's KL baseline)",
    "told": "given, passed",
    "as of": "as in",
}
# Words of `RETIRED` that have another meaning, and this meaning.
AMBIGUOUS = {
    "candidates": "several of which one is chosen",
    "draw": "random numbers; a chart",
    "frame": "of Python's stack",
    "outcome": "of a response, in outcome rewards",
    "overlap": "of communication and computation",
    "signal": "to a process",
}
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


@cache
def by_last_name() -> dict[str, list[Place]]:
    found: dict[str, list[Place]] = {}
    for place in places():
        last = (*place.module.split("."), *place.names)[-1]
        found.setdefault(last, []).append(place)
    return found


def named(reference: str, place: Place) -> list[Place]:
    """Places that a reference means: the nearest of its class, its module, the package."""
    ends = f".{reference}"
    candidates = [
        each
        for each in by_last_name().get(reference.rpartition(".")[2], [])
        if f".{'.'.join((each.module, *each.names))}".endswith(ends) and each.node != place.node
    ]
    own = [each for each in candidates if each.module == place.module]
    near = [each for each in own if each.names[:-1] == place.names[:-1]]
    return near or own or candidates


def states_shape(place: Place, asked: frozenset[str] = frozenset()) -> bool:
    """Whether a shape stands there, or where it refers to."""
    words = words_of(place)
    return bool(SHAPE.search(words)) or any(
        states_shape(each, asked | {place.line})
        for reference in REFERENCE.findall(words)
        for each in named(reference, place)
        if each.line not in asked
    )


def test_every_tensor_argument_has_a_shape():
    taking = [place for place in places() if is_public(place) and takes_tensor(place)]
    assert len(taking) > 300  # the rule below is about something
    assert [
        f"{place.line}: {'.'.join(place.names)}" for place in taking if not states_shape(place)
    ] == []


def test_docstrings_open_with_a_noun_or_a_verb():
    strays = []
    for module in (place for place in places() if isinstance(place.node, ast.Module)):
        for node in ast.walk(module.node):
            if isinstance(node, ast.Module | Definition):
                text = ast.get_docstring(node) or ""
                if re.match(rf"({'|'.join(OPENINGS)})\b", text):
                    line = node.body[0].lineno
                    strays.append(f"{module.line}:{line}: {text.splitlines()[0]}")
    assert not strays, "\n".join(strays)


def retired_words() -> list[str]:
    """Return the words of `RETIRED` without `AMBIGUOUS`."""
    words = [word for entry in RETIRED for word in entry.lower().split(", ")]
    assert set(AMBIGUOUS) <= set(words), "a word that needs no exception"
    return [word for word in words if word not in AMBIGUOUS]


def words_in(text: str) -> str:
    """Words of prose or of an identifier in lower case, one space before and after each."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)
    return f" {' '.join(re.findall(r'[a-z]+', apart.lower()))} "


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings of a module, and names that it defines, with their lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | Definition):
            if text := ast.get_docstring(node):
                yield node.body[0].lineno, text
            if not isinstance(node, ast.Module):
                yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def test_retired_words_are_gone():
    retired = [words_in(word) for word in retired_words()]
    assert len(retired) > 20
    strays = [
        f"{relative(path)}:{line}:{word}: {text.splitlines()[0]}"
        for path in modules()
        for line, text in texts_of(path)
        for words in [words_in(text)]
        for word in retired
        if word in words or f"{word[:-1]}s " in words
    ]
    assert not strays, "\n".join(strays)
