"""NeMo-RL's `Policy`, as its reference document has it: imports, arguments and calls of workers.

The document lies beside the repository, not in it; its code has lost its line ends below the
imports, so the imports are executed and the rest is read.
"""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

from aligner.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from aligner.models.policy.lm_policy import Policy

FOLDER = Path(__file__).parents[3] / "shared" / "seeds"
DOCUMENT = next(iter(FOLDER.glob("001_*.txt")), None)
pytestmark = pytest.mark.skipif(
    DOCUMENT is None, reason=f"needs the reference documents in {FOLDER}"
)


@pytest.fixture(scope="module")
def text():
    return DOCUMENT.read_text().replace("nemo_rl", "aligner")


@pytest.fixture(scope="module")
def worker_paths(text):
    return re.findall(r'"(aligner\.[\w.]+Worker)"', text)


def worker_class(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def arguments_of(call, text):
    """Keywords of every call of this name in the text."""
    found = set()
    for match in re.finditer(rf"\b{call}\(", text):
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        node = ast.parse(f"f({text[match.end() : end - 1]})".replace("\n", " ")).body[0].value
        found |= {keyword.arg for keyword in node.keywords}
    return found


def test_its_imports_run(text):
    block = text[text.index("import os") : text.index("PathLike =")]
    names = {}
    exec(compile(block, str(DOCUMENT), "exec"), names)
    ours = [
        node for node in ast.parse(block).body if "aligner" in (getattr(node, "module", "") or "")
    ]
    assert len(ours) == 8
    assert all(alias.name in names for node in ours for alias in node.names)


def test_its_arguments_are_those_of_groups_builders_and_workers(text, worker_paths):
    assert len(worker_paths) == 2
    group = inspect.signature(RayWorkerGroup).parameters
    assert arguments_of("RayWorkerGroup", text) <= set(group)
    given = arguments_of("RayWorkerBuilder", text)
    assert "worker_sharding_annotations" in given
    for path in worker_paths:
        inspect.signature(worker_class(path)).bind("config", **dict.fromkeys(given))
        RayWorkerBuilder(path, "config", **dict.fromkeys(given))


def test_its_constructor_and_methods_are_ours(text):
    methods = set(re.findall(r"\bdef (\w+)\(", text))
    assert len(methods) > 20
    assert [name for name in methods if not hasattr(Policy, name)] == []
    names = re.findall(
        r"(\w+): ", text[text.index("def __init__(") : text.index("): if weights_path")]
    )
    assert len(names) == 9
    assert set(names) <= set(inspect.signature(Policy).parameters)


def test_what_it_calls_on_workers_is_there(text, worker_paths):
    called = set(re.findall(r'run_all_workers_\w+\( ?"(\w+)"', text))
    assert len(called) > 12
    for path in worker_paths:
        assert [name for name in called if not hasattr(worker_class(path), name)] == []
