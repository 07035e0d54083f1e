"""Imports point down, and what is confined stays confined. A rule without a checker is no rule."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "aligner"

# From the bottom up; a module may import from its own layer and from those above it in this list.
LAYERS = [
    ["aligner.errors", "aligner.types", "aligner.architecture", "aligner.catalog"],
    ["aligner.config"],
    [
        "aligner.data",
        "aligner.distributed",
        "aligner.checkpoint",
        "aligner.rewards",
        "aligner.observe",
        "aligner.algorithms.losses",
        "aligner.losses.advantages",
        "aligner.losses.kl",
        "aligner.losses.masked",
    ],
    [
        "aligner.models.interfaces",
        "aligner.models.gpt",
        "aligner.generation.vllm.engine",
        "aligner.generation.vllm.extension",
        "aligner.generation.vllm.sampling",
    ],
    [
        "aligner.models.role_worker",
        "aligner.generation.vllm.worker",
        "aligner.models.policy.workers",
        "aligner.models.value.workers",
        "aligner.models.reward.workers",
    ],
    [
        "aligner.cluster.sharded",
        "aligner.models.role_front",
        "aligner.models.generation",
        "aligner.models.policy",
        "aligner.models.value",
        "aligner.models.reward",
    ],
    ["aligner.algorithms", "aligner.dry", "aligner.plan"],
    ["aligner.commands"],
]
CONFINED = {
    "omegaconf": ["aligner/config/", "examples/", "tests/"],
    "hydra": ["aligner/config/", "examples/", "tests/"],
    "ray": ["aligner/cluster/ray/virtual_cluster.py", "aligner/distributed/ray_"],
    "vllm": ["aligner/models/generation/vllm"],
    "nemo": [
        "aligner/checkpoint/",
        "aligner/data/tokenizer",
        "aligner/models/gpt/megatron/model.py",
    ],
}


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module):
    """Index of the layer with the longest matching prefix; None for the package itself."""
    best = max(
        (
            (len(prefix), index)
            for index, layer in enumerate(LAYERS)
            for prefix in layer
            if module == prefix or module.startswith(f"{prefix}.")
        ),
        default=None,
    )
    return None if best is None else best[1]


def imports_of(path):
    """Absolute names of everything a file imports, wherever in it, with line numbers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.module, node.lineno
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def relative(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", modules(), ids=relative)
def test_imports_point_down(path):
    own = layer_of(name_of(path))
    if own is None:  # aligner/__init__.py and packages that only group others
        return
    upward = [
        f"line {line}: {name}"
        for name, line in imports_of(path)
        if name.startswith("aligner.") and (layer_of(name) or 0) > own
    ]
    assert upward == []


def test_every_module_has_a_layer():
    grouping = {"aligner", "aligner.models"}
    assert [name_of(p) for p in modules() if layer_of(name_of(p)) is None] == sorted(grouping)


@pytest.mark.parametrize("package", CONFINED)
def test_packages_stay_confined(package):
    allowed = CONFINED[package]
    strays = [
        f"{relative(path)}:{line}"
        for path in [*modules(), *sorted((ROOT / "examples").glob("*.py"))]
        if not relative(path).startswith(tuple(allowed))
        for name, line in imports_of(path)
        if name.split(".")[0] == package
    ]
    assert strays == []


def test_only_the_device_seam_mentions_cuda():
    strays = [
        f"{relative(path)}:{node.lineno}"
        for path in modules()
        # The dry device stands in for what the seam calls.
        if relative(path) != "aligner/distributed/accelerator.py"
        and not relative(path).startswith("aligner/dry/")
        for node in ast.walk(ast.parse(path.read_text()))
        if _mentions_cuda(node)
    ]
    assert strays == []


def _mentions_cuda(node):
    if isinstance(node, ast.Attribute):
        return node.attr == "cuda"
    if isinstance(node, ast.Constant):  # device="cuda", not prose
        return isinstance(node.value, str) and (node.value == "cuda" or node.value[:5] == "cuda:")
    names = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    return any(name.startswith("torch.cuda") for name in names)


def test_entry_scripts_are_short():
    long = [
        f"{relative(path)}: {len(path.read_text().splitlines())} lines"
        for path in sorted((ROOT / "examples").glob("train_*.py"))
        if len(path.read_text().splitlines()) > 40
    ]
    assert long == []
