"""Sizes of the library: lines, files, packages, errors and helpers.

    python -m benchmarks.structure            # of this tree
    python -m benchmarks.structure --of TREE  # of another checkout, to compare two versions

Prints one line for each measure. `python -m benchmarks.step_trace` counts the files of a PPO step.
"""

import argparse
import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import ROOT

SHORT = 5  # lines of a function's body without its docstring


def modules(folder: Path) -> dict[Path, ast.Module]:
    """Parse the Python files below ``folder``."""
    return {path: ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}


def lines_of(folder: Path) -> int:
    """Count the lines of the Python files below ``folder``."""
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def functions(trees: dict[Path, ast.Module]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function and method of ``trees``."""
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def short_helpers(trees: dict[Path, ast.Module]) -> int:
    """Count private functions of at most ``SHORT`` lines that are used once."""
    names: Counter[str] = Counter()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                names[node.id] += 1
            elif isinstance(node, ast.Attribute):
                names[node.attr] += 1
    return sum(
        function.name.startswith("_")
        and not function.name.startswith("__")
        and names[function.name] == 1
        and _body_lines(function) <= SHORT
        for function in functions(trees)
    )


def _body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def measures(root: Path) -> dict[str, float]:
    """Return each measure of the checkout at ``root`` by its name."""
    library = modules(root / "aligner")
    lines = lines_of(root / "aligner")
    raises = sum(
        isinstance(node, ast.Raise) for tree in library.values() for node in ast.walk(tree)
    )
    classes = Counter(
        node.name
        for tree in library.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return {
        "files of aligner/": len(library),
        "lines of aligner/": lines,
        "lines of aligner_plan/": lines_of(root / "aligner_plan"),
        "lines of aligner_environments/": lines_of(root / "aligner_environments"),
        "lines of tests/": lines_of(root / "tests"),
        "lines of conf/": sum(
            len(p.read_text().splitlines()) for p in root.rglob("conf/**/*.yaml")
        ),
        "required packages": len(project["dependencies"]),
        "raise statements per 1,000 lines": round(1000 * raises / lines, 1),
        f"private functions of at most {SHORT} lines that are named once": short_helpers(library),
        "class names that occur twice or more": sum(count > 1 for count in classes.values()),
    }


def main() -> None:
    """Print the measures of a checkout."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--of", type=Path, default=ROOT, metavar="TREE")
    for name, value in measures(parser.parse_args().of).items():
        print(f"{value:>10,}  {name}")


if __name__ == "__main__":
    main()
