"""Nothing that a less trusted process writes is unpickled: every place that unpickles, by name."""

import ast

from documented import ROOT

_NAMES = {"loads", "load", "Unpickler", "recv", "recv_bytes"}
_MODULES = {"pickle", "cloudpickle", "_pickle", "dill", "marshal", "torch", "joblib", "shelve"}

_SOCKETS = ("dist", "self.socket", "torch.distributed")

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
        for place, node in _calls(ast.parse(path.read_text()), ""):
            module, _, name = ast.unparse(node.func).rpartition(".")
            is_reading = name in _NAMES and (module in _MODULES or name.startswith("recv"))
            if not module:
                is_reading = name.endswith("Unpickler")
            keywords = {ast.unparse(keyword) for keyword in node.keywords}
            if is_reading and "weights_only=True" not in keywords and module not in _SOCKETS:
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
