"""Packages and machine of a run: extras, versions for its records, effects of missing packages.

No environment variables are recorded: they hold secrets.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from aligner.errors import MissingPackageError, VersionError


@dataclass(frozen=True)
class OptionalPackage:
    """A package that the library uses if it is installed."""

    name: str  # under which it is imported
    without: str  # what is different without it
    install: str
    gpu_only: bool = False
    # A submodule that distinguishes the real package from an unrelated one of the same name.
    submodule: str | None = None
    alternative: str | None = None  # another top-level module that proves it is there
    extra: str | None = None  # of pyproject.toml
    only_missing: bool = False  # start-up reports do not name it if it is installed


def _of_extra(
    extra: str, without: str, *names: str, reported: bool = False
) -> list[OptionalPackage]:
    """Packages of an extra of pyproject.toml."""
    install = f'pip install "aligner[{extra}]"'
    return [
        OptionalPackage(name, without, install, extra=extra, only_missing=not reported)
        for name in names
    ]


OPTIONAL_PACKAGES = (
    OptionalPackage(
        "apex",
        "with Transformer Engine nothing: megatron-core takes its fused optimizer first; else "
        "torch's AdamW and gradient norms",
        "NVIDIA Apex from source, or an NGC PyTorch container",
        gpu_only=True,
        submodule="optimizers",
        alternative="amp_C",
    ),
    OptionalPackage(
        "transformer_engine",
        "no FP8; the local layer spec; Apex's fused optimizer or, without Apex, torch's AdamW",
        "pip install 'transformer_engine[pytorch]>=2.9,<2.12', or an NGC PyTorch container",
        gpu_only=True,
    ),
    OptionalPackage(
        "flash_attn",
        "packed sequences attend through torch's kernel; before 2.11 it has no sliding windows",
        "pip install flash-attn",
        gpu_only=True,
    ),
    OptionalPackage(
        "vllm",
        "generation.backend=vllm is not available; the policy generates by itself",
        "pip install vllm in an environment of its own",
    ),
    *_of_extra("wandb", "exp_manager.create_wandb_logger=true is refused", "wandb", reported=True),
    *_of_extra(
        "tensorboard",
        "no TensorBoard curves; metrics.jsonl has the numbers",
        "tensorboard",
        reported=True,
    ),
    *_of_extra("ray", "cluster.engine=ray and generation.backend=vllm are refused", "ray"),
    *_of_extra(
        "serve",
        "servers, reward.kind=server and environment.kind=endpoint are refused",
        *("fastapi", "uvicorn", "httpx"),
    ),
    *_of_extra("gguf", "GGUF files are refused", "gguf"),
    *_of_extra("math", "the verifier aligner.rewards.math_verify is refused", "math_verify"),
    *_of_extra("parquet", "Parquet files are refused", "pyarrow"),
    *_of_extra("tasks", "the tasks of reasoning-gym are refused", "reasoning_gym"),
)


def require_extra(extra: str, purpose: str) -> None:
    """Check that the packages of an extra are installed, without importing them.

    Args:
        extra: its name in pyproject.toml.
        purpose: what needs the packages, such as a setting, for the message.

    Raises:
        MissingPackageError: names the packages that are missing and the command that installs them.
    """
    packages = [package for package in OPTIONAL_PACKAGES if package.extra == extra]
    missing = [package.name for package in packages if not _is_installed(package)]
    if missing:
        raise MissingPackageError(
            f"{purpose} needs {', '.join(missing)}, not installed here; {packages[0].install}"
        )


# First versions that work and first that are not known to; those of pyproject.toml.
SUPPORTED = {"torch": ((2, 10), (2, 14)), "megatron-core": ((0, 16), (0, 17))}
# Those outside of which a run is not refused, and the start-up report says so.
TRIED = {
    "nemo-toolkit": ((3, 0), (3, 1)),
    "transformers": ((5, 16), (6,)),
    "ray": ((2, 52), (3,)),
    "transformer_engine": ((2, 9), (2, 12)),
}


def check_versions(installed: Callable[[str], str | None] | None = None) -> None:
    """Refuse libraries that the code calls in ways they do not have, before a run begins.

    Pre-releases count as the release they lead to: NVIDIA's images have such builds of torch.

    Raises:
        VersionError: names the package, its version and those that work.
    """
    for name, version, low, high in _outside(SUPPORTED, installed or _version):
        raise VersionError(
            f"{name} {version} is installed, and {low} or newer, below {high}, is needed. "
            f"Install one (pip install '{name}>={low},<{high}'), or an image that brings one "
            "(Dockerfile)"
        )


def untried_versions(installed: Callable[[str], str | None] | None = None) -> list[str]:
    """Packages whose versions are not among those the library was tried with, in words."""
    return [
        f"{name} {version} is installed; {low} or newer, below {high}, was tried"
        for name, version, low, high in _outside(TRIED, installed or _version)
    ]


def _outside(
    ranges: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    installed: Callable[[str], str | None],
) -> Iterator[tuple[str, str, str, str]]:
    """Name, version, first and end of each package that is outside of its range."""
    for name, (first, end) in ranges.items():
        version = installed(name)
        if version is None:  # no metadata: nothing is known against it
            continue
        release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if not first <= release < end:
            yield name, version, ".".join(map(str, first)), ".".join(map(str, end))


@dataclass(frozen=True)
class PackageStatus:
    """Presence of a package. ``version``: None where it has no metadata."""

    package: OptionalPackage
    found: bool
    version: str | None = None


def find_packages(
    packages: tuple[OptionalPackage, ...] = OPTIONAL_PACKAGES,
) -> list[PackageStatus]:
    """Look for the packages without importing them; those that a report names."""
    found = [(package, _is_installed(package)) for package in packages]
    return [
        PackageStatus(package, there, _version(package.name) if there else None)
        for package, there in found
        if not (there and package.only_missing)
    ]


def _is_installed(package: OptionalPackage) -> bool:
    if package.alternative is not None and importlib.util.find_spec(package.alternative):
        return True
    spec = importlib.util.find_spec(package.name)
    if spec is None or package.submodule is None:
        return spec is not None
    # find_spec("apex.optimizers") would import apex, whichever package that is: look at its files.
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    name = package.submodule
    return any((f / name).is_dir() or (f / f"{name}.py").is_file() for f in folders)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


_PACKAGES = (
    "aligner",
    "torch",
    "megatron-core",
    "nemo-toolkit",
    "lightning",
    "transformers",
    "ray",
    "numpy",
)


def describe_environment(device: str) -> dict[str, str]:
    """Command, Python, packages and machine; ``device`` in words comes from the device seam."""
    return {
        "command": shlex.join([os.path.basename(sys.executable), *sys.argv]),
        "device": device,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        **{package: _version(package) or "not installed" for package in _PACKAGES},
    }
