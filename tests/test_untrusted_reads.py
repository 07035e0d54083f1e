"""Nothing that a less trusted process writes is unpickled: every place that unpickles, by name."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
_NAMES = {"loads", "load", "Unpickler", "recv", "recv_bytes"}
_MODULES = {"pickle", "cloudpickle", "_pickle", "dill", "marshal", "torch", "joblib", "shelve"}

# function → why what it reads was written by this process, its parent or its own run
KNOWN = {
    "algorithms/rollout/driver.py Driver._poll": "bytes of this process, which wake its thread",
    "checkpoint/nemo/tensor_file.py _load_zip": "torch's weights-only unpickler",
    "checkpoint/nemo/torch_dist.py read_metadata": "classes of a fixed list alone",
    "child_process.py Channel.receive": "the parent's message",
    "distributed/ray/worker.py _failure": "what this process has just pickled",
}


def _places():
    files = ROOT.glob("aligner*/**/*.py")
    for path in sorted(files):
        tree = ast.parse(path.read_text())
        file = path.relative_to(ROOT).as_posix().removeprefix("aligner/")
        for place, node in _calls(tree, ""):
            function = node.func
            if isinstance(function, ast.Name):
                is_reading = function.id.endswith("Unpickler")
                module = ""
            elif isinstance(function, ast.Attribute):
                module = ast.unparse(function.value)
                is_reading = function.attr in _NAMES and (
                    module in _MODULES or function.attr.startswith("recv")
                )
            else:
                continue
            safe = any(
                k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords
            )
            if (
                is_reading
                and not safe
                and module not in ("dist", "self.socket", "torch.distributed")
            ):
                yield f"{file} {place}"


def _calls(node, place):
    for child in ast.iter_child_nodes(node):
        inner = place
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{place}.{child.name}".lstrip(".")
        if isinstance(child, ast.Call):
            yield inner, child
        yield from _calls(child, inner)


def test_every_place_that_unpickles_is_known():
    assert set(_places()) == KNOWN.keys()
