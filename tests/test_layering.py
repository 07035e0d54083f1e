"""Imports point down, no modules import each other, and packages of others stay where they belong.

ruff holds the sizes of functions (pyproject.toml); sizes of files and folders are held here.
"""

import ast
import graphlib
from collections import Counter, defaultdict
from functools import cache

import pytest
from documented import ROOT

FOLDERS = [ROOT / "aligner", ROOT / "aligner_environments", ROOT / "aligner_plan"]
# From the bottom up: a module imports from its own package and from those above it in this list.
# The longest name that fits is a module's package.
PACKAGES = [
    f"aligner.{name}"
    for name in [
        "errors",
        "packages",
        "foreign_keys",
        "compat",
        "types",
        "architecture",
        "plain",
        "user_files",
        "importing",
        "scratch",
        "process_tree",
        "child_process",
        "http",
        "catalog",
        "hub",
        "config",
        "kernels",
        "device",
        "parallel",
        "logprobs",
        "distributed",
        "losses",
        "data",
        "checkpoint",
        "observe",
        "refit",
        "models.interfaces",
        "models.gpt.lora",
        "models.gpt.layers",
        "models.gpt.forward",
        "models.gpt.decode",
        "models.gpt.role",
        "models.gpt.megatron",
        "models.gpt.dtensor",
        "models.gpt",
        "models",
        "rewards",
        "environments",
        "generation",
        "serving",
        "algorithms",
        "commands",
        "api",
    ]
]
PACKAGES += ["aligner_environments", "aligner_plan.dry", "aligner_plan"]
MODULES_IN_A_FOLDER = 16
LINES_OF_A_FILE = 450
CONFINED = {
    "omegaconf": ["aligner/config/", "examples/"],
    "hydra": ["aligner/config/", "aligner_plan/options.py", "examples/"],
    "ray": ["aligner/distributed/"],
    "vllm": ["aligner/generation/vllm/"],
    "nemo": ["aligner/checkpoint/nemo/connector.py", "aligner/models/gpt/megatron/model.py"],
    "fastapi": ["aligner/http/", "aligner/rewards/server/", "aligner/serving/"],
    "httpx": ["aligner/rewards/server/"],
    "uvicorn": ["aligner/http/"],
}


@cache
def modules():
    return sorted(path for folder in FOLDERS for path in folder.rglob("*.py"))


@cache
def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def relative(path):
    return path.relative_to(ROOT).as_posix()


@cache
def imports_of(path):
    """Modules that a file imports, wherever in it: of ``from package import module`` the module."""
    names, found = {name_of(path) for path in modules()}, set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in names else node.module for name in full}
    return found - {name_of(path)}


def place_of(module):
    """Index of the longest name of `PACKAGES` that fits; -1 for the package itself."""
    fitting = [name for name in PACKAGES if f"{module}.".startswith(f"{name}.")]
    return PACKAGES.index(max(fitting, key=len)) if fitting else -1


def test_every_module_has_a_place():
    names = {name_of(path) for path in modules()}
    assert set(PACKAGES) <= names
    assert [name for name in names if place_of(name) < 0] == ["aligner"]


def test_imports_point_down():
    upward = [
        f"{relative(path)}: {name}"
        for path in modules()
        for name in imports_of(path)
        if name.startswith("aligner") and 0 <= place_of(name_of(path)) < place_of(name)
    ]
    assert upward == []


def test_the_library_runs_without_its_sibling_packages():
    """Only the script behind ``aligner plan`` imports the planner."""
    siblings = {"aligner_environments", "aligner_plan"}
    importers = {
        relative(path)
        for path in [*modules(), *sorted((ROOT / "examples").rglob("*.py"))]
        if (packages := {name.partition(".")[0] for name in imports_of(path)} & siblings)
        and packages != {relative(path).partition("/")[0]}
    }
    assert importers == {"examples/plan.py"}


def test_neither_modules_nor_packages_import_each_other_in_a_circle():
    """Imports inside functions and for type checkers count too."""
    names = {name_of(path) for path in modules()}
    imports = {name_of(path): imports_of(path) & names for path in modules()}
    graphlib.TopologicalSorter(imports).prepare()
    # At each level, the packages and modules of one package import each other in one direction.
    levels = defaultdict(lambda: defaultdict(set))
    for importer, imported_names in imports.items():
        for imported in imported_names:
            pairs = enumerate(zip(importer.split("."), imported.split("."), strict=False))
            level = next((index for index, (one, other) in pairs if one != other), None)
            if level is not None:
                package = ".".join(importer.split(".")[:level])
                levels[package][importer.split(".")[level]].add(imported.split(".")[level])
    for siblings in levels.values():
        graphlib.TopologicalSorter(siblings).prepare()


@pytest.mark.parametrize("package", CONFINED)
def test_packages_stay_confined(package):
    strays = [
        relative(path)
        for path in [*modules(), *sorted((ROOT / "examples").glob("*.py"))]
        if not relative(path).startswith(tuple(CONFINED[package]))
        and package in {name.split(".")[0] for name in imports_of(path)}
    ]
    assert strays == []


def test_only_the_device_seam_mentions_cuda():
    def mentions_cuda(node):
        if isinstance(node, ast.Constant):  # device="cuda", not prose
            return isinstance(node.value, str) and node.value.partition(":")[0] == "cuda"
        return isinstance(node, ast.Attribute) and node.attr == "cuda"

    strays = [
        relative(path)
        for path in modules()
        # The dry device replaces what the seam calls.
        if not relative(path).startswith(("aligner/device/accelerator.py", "aligner_plan/dry/"))
        and (
            any(name.startswith("torch.cuda") for name in imports_of(path))
            or any(map(mentions_cuda, ast.walk(ast.parse(path.read_text()))))
        )
    ]
    assert strays == []


def test_folders_and_files_are_small():
    folders = Counter(relative(p.parent) for p in modules() if p.name != "__init__.py")
    assert {folder: n for folder, n in folders.items() if n > MODULES_IN_A_FOLDER} == {}
    lines = {relative(path): len(path.read_text().splitlines()) for path in modules()}
    assert {file: n for file, n in lines.items() if n > LINES_OF_A_FILE} == {}
    scripts = {p: len(p.read_text().splitlines()) for p in (ROOT / "examples").glob("train_*.py")}
    assert {path.name: n for path, n in scripts.items() if n > 40} == {}
