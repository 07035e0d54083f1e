"""Imports point down, folders are small, and what is confined stays confined.

A rule without a checker is no rule.
"""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "aligner"

# From the bottom up: a module imports from its own package and from those above it in this list.
# The longest name that fits is a module's package.
PACKAGES = [
    "aligner.errors",
    "aligner.types",
    "aligner.architecture",
    "aligner.importing",
    "aligner.catalog",
    "aligner.config",
    "aligner.kernels",
    "aligner.distributed",
    "aligner.batches",
    "aligner.losses",
    "aligner.logprobs",
    "aligner.data",
    "aligner.checkpoint",
    "aligner.observe",
    "aligner.cluster",
    "aligner.refit",
    "aligner.models.interfaces",
    "aligner.models.gpt.lora",
    "aligner.models.gpt.layers",
    "aligner.models.gpt.forward",
    "aligner.models.gpt.decode",
    "aligner.models.gpt.role",
    "aligner.models.gpt.megatron",
    "aligner.models.gpt.dtensor",
    "aligner.models.gpt",
    "aligner.models",
    "aligner.rewards",
    "aligner.generation",
    "aligner.algorithms",
    "aligner.dry",
    "aligner.plan",
    "aligner.commands",
]
# Published paths of what is in another room: they only import, and only users import them.
FACES = [
    "aligner.algorithms.logits_sampling_utils",
    "aligner.algorithms.losses.interfaces",
    "aligner.algorithms.losses.policy",
    "aligner.algorithms.losses.value",
    "aligner.distributed.batched_data_dict",
    "aligner.distributed.model_utils",
    "aligner.distributed.named_sharding",
    "aligner.distributed.virtual_cluster",
    "aligner.distributed.worker_groups",
]
MODULES_IN_A_FOLDER = 16
CONFINED = {
    "omegaconf": ["aligner/config/", "examples/", "tests/"],
    "hydra": ["aligner/config/", "examples/", "tests/"],
    "ray": ["aligner/cluster/ray/"],
    "vllm": ["aligner/generation/vllm/"],
    "nemo": ["aligner/checkpoint/nemo/connector.py", "aligner/models/gpt/megatron/model.py"],
}


@cache
def modules():
    return sorted(PACKAGE.rglob("*.py"))


@cache
def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def place_of(module):
    """Index of the longest name of `PACKAGES` that fits; None for the package itself."""
    fitting = [p for p in PACKAGES if module == p or module.startswith(f"{p}.")]
    return PACKAGES.index(max(fitting, key=len)) if fitting else None


@cache
def imports_of(path):
    """Absolute names of everything a file imports, wherever in it, with line numbers."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found.append((node.module, node.lineno))
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def relative(path):
    return path.relative_to(ROOT).as_posix()


def test_every_package_of_the_list_is_there():
    assert len(set(PACKAGES)) == len(PACKAGES)
    assert set(PACKAGES) | set(FACES) <= {name_of(path) for path in modules()}


def test_every_module_has_a_place():
    assert [name_of(p) for p in modules() if place_of(name_of(p)) is None] == ["aligner"]


@pytest.mark.parametrize("path", modules(), ids=relative)
def test_imports_point_down(path):
    own = place_of(name_of(path))
    if own is None or name_of(path) in FACES:
        return
    upward = [
        f"line {line}: {name}"
        for name, line in imports_of(path)
        if name.startswith("aligner.") and (place_of(name) or 0) > own
    ]
    assert upward == []


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside functions and for type checkers count too."""
    names = {name_of(path) for path in modules()}
    needs = {name_of(path): modules_needed(path, names) for path in modules()}
    # Modules that need none that is left go, again and again; circles and what needs them stay.
    while ready := [name for name, needed in needs.items() if not needed]:
        for name in ready:
            del needs[name]
        for needed in needs.values():
            needed.difference_update(ready)
    assert {name: sorted(needed) for name, needed in needs.items()} == {}


def modules_needed(path, names):
    """Modules that a file imports: of ``from package import module`` the module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in names else node.module for name in full}
    return found & names - {name_of(path)}


def test_no_folder_has_many_modules():
    sizes = Counter(relative(p.parent) for p in modules() if p.name != "__init__.py")
    assert {folder: n for folder, n in sizes.items() if n > MODULES_IN_A_FOLDER} == {}


def test_published_paths_only_import():
    strays = [
        f"{relative(path)}:{line}: {name}"
        for path in modules()
        if name_of(path) not in FACES
        for name, line in imports_of(path)
        if name in FACES
    ]
    assert strays == []
    for path in modules():
        if name_of(path) in FACES:
            code = [node for node in ast.parse(path.read_text()).body[1:] if not _only_names(node)]
            assert code == [], relative(path)


def _only_names(node):
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets] == ["__all__"]
    if isinstance(node, ast.FunctionDef):
        return node.name == "__getattr__"
    return isinstance(node, (ast.Import, ast.ImportFrom))


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
