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
    for path in sorted(ROOT.glob("aligner*/**/*.py")):
        file = path.relative_to(ROOT).as_posix().removeprefix("aligner/")
        for place, call in _calls(ast.parse(path.read_text()), ""):
            module, _, name = ast.unparse(call.func).rpartition(".")
            is_reading = name.endswith("Unpickler")
            if module:
                is_reading = name in _NAMES and (module in _MODULES or name.startswith("recv"))
            safe = any(ast.unparse(each) == "weights_only=True" for each in call.keywords)
            is_collective = module in ("dist", "self.socket", "torch.distributed")
            if is_reading and not safe and not is_collective:
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
