"""Check that names and prose are plain: ``python -m docs.tools.plain``.

Names: assignments, parameters, functions and classes that are one vague word, per 1,000 names of
the library. Phrases: occurrences per 10,000 words of docstrings, comments and messages of the
library, and of README and pages. The limits are about twice the highest rate of torchtitan, TRL,
verl, prime-rl, Stable-Baselines3 and tinker-cookbook (2026-11-24).
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
VAGUE = re.compile(
    r"after|again|along|apart|asked|asks|before|begun|behind|beside|came|come|comes|each|found|"
    r"given|goes|going|gone|held|here|holds|kept|known|left|made|many|much|needed|one|other|"
    r"others|own|place|places|rest|said|same|says|seen|sees|some|stands|taken|talk|tells|there|"
    r"together|told|took|wanted|wants|went|what|which|whole|whose|done"
)
MOST_VAGUE = 7.0
# Most occurrences of each pattern per 10,000 words.
PHRASES = {
    r"\b(?:is|are|was|were) no (?!longer\b)\w+": 2.8,
    r"\b(?:says|said|tells|told|asks|asked|speaks|spoke)\b": 3.6,
    r"\b(?:stands?|stood)\b": 1.2,
    r"\bbeside\b": 0.5,
    r"\bbehind\b": 5.0,
    r"\bof (?:its|their|your|our|his|a user's|the user's) own\b": 1.0,
    r"\b(?:holds?|held)\b": 12.6,
    r"\b(?:nobody|nothing|none)\b": 60.0,
    r"\b(?:comes?|came) (?:to|out|back|in|from|with|of)\b": 4.0,
    r", for (?:it|they|he|there|this|that|these|no|nobody|nothing)\b": 0.5,
    r"\bby name\b": 1.2,
    r"\b(?:so many|so much|so long)\b": 1.5,
    r"\bfurther\b": 1.6,
}


class Measure(NamedTuple):
    """A rate, its limit, and the places that count."""

    subject: str
    rate: float
    limit: float
    places: list[str]

    @property
    def is_exceeded(self) -> bool:
        """Whether the rate is above the limit."""
        return self.rate > self.limit


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each name that a module binds."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id


def prose(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of docstrings, comments and strings that contain a space."""
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if " " in text.strip():
                yield node.lineno, text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def phrase_measures(texts: Iterable[tuple[str, str]], kind: str) -> Iterator[Measure]:
    """Yield a measure for each phrase in ``texts``, pairs of a place and a text."""
    texts = list(texts)
    words = max(1, sum(len(re.findall(r"[A-Za-z']+", text)) for _, text in texts))
    for pattern, limit in PHRASES.items():
        places = [
            f"{place}: {match[0]}"
            for place, text in texts
            for match in re.finditer(pattern, text, re.IGNORECASE)
        ]
        yield Measure(f"{pattern} in {kind}", 1e4 * len(places) / words, limit, places)


def measures(root: Path = ROOT) -> list[Measure]:
    """Measure the library and the documents of the checkout at ``root``."""
    bound, vague, texts = 0, Counter[str](), list[tuple[str, str]]()
    places = list[str]()
    for path in sorted((root / "aligner").rglob("*.py")):
        source, name = path.read_text(), path.relative_to(root)
        tree = ast.parse(source)
        for line, text in names(tree):
            bound += 1
            if VAGUE.fullmatch(text.strip("_")):
                vague[text] += 1
                places.append(f"{name}:{line}: {text}")
        texts += [(f"{name}:{line}", text) for line, text in prose(source, tree)]
    pages = []
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        text = re.sub(r"```.*?```|`[^`]*`|\|", " ", path.read_text(), flags=re.DOTALL)
        pages.append((str(path.relative_to(root)), text))
    return [
        Measure("vague names", 1e3 * sum(vague.values()) / bound, MOST_VAGUE, places),
        *phrase_measures(texts, "code"),
        *phrase_measures(pages, "documents"),
    ]


def main() -> None:
    """Print every measure, and the places of those above their limit."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    results = measures()
    for measure in results:
        mark = "!" if measure.is_exceeded else " "
        print(f"{mark} {measure.rate:6.1f} of at most {measure.limit:5.1f}  {measure.subject}")
    for measure in results:
        if measure.is_exceeded:
            print(f"\n{measure.subject}", *measure.places, sep="\n  ")
    sys.exit(any(measure.is_exceeded for measure in results))


if __name__ == "__main__":
    main()
