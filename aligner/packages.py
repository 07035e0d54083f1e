"""Installed packages: extras, supported versions, and the description of a run's machine."""

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

    name: str  # name of its top-level module
    without: str  # what happens without the package
    install: str  # command or advice for its installation
    gpu_only: bool = False
    # A submodule that distinguishes the package from an unrelated package of the same name.
    submodule: str | None = None
    alternative: str | None = None  # another top-level module of the package
    extra: str | None = None  # extra in pyproject.toml
    only_missing: bool = False  # start-up reports list it only if it is missing


def _extra_packages(
    extra: str, without: str, *names: str, reported: bool = False
) -> list[OptionalPackage]:
    install = f'pip install "aligner[{extra}]"'
    return [
        OptionalPackage(name, without, install, extra=extra, only_missing=not reported)
        for name in names
    ]


OPTIONAL_PACKAGES = (
    OptionalPackage(
        "apex",
        "torch's AdamW and gradient norms (no effect with Transformer Engine, whose fused "
        "optimizer megatron-core prefers)",
        "NVIDIA Apex from source, or an NGC PyTorch container",
        gpu_only=True,
        submodule="optimizers",
        alternative="amp_C",
    ),
    OptionalPackage(
        "transformer_engine",
        "no FP8, the local layer spec, Apex's fused optimizer or, without Apex, torch's AdamW",
        "pip install 'transformer_engine[pytorch]>=2.9,<2.12', or an NGC PyTorch container",
        gpu_only=True,
    ),
    OptionalPackage(
        "flash_attn",
        "torch's attention kernel for packed sequences (before 2.11 without sliding windows)",
        "pip install flash-attn",
        gpu_only=True,
    ),
    OptionalPackage(
        "vllm",
        "generation.backend=vllm is not available, only generation by the policy",
        "pip install vllm in a separate environment",
    ),
    *_extra_packages(
        "wandb", "exp_manager.create_wandb_logger=true is refused", "wandb", reported=True
    ),
    *_extra_packages(
        "tensorboard",
        "no TensorBoard curves (metrics.jsonl contains the metrics)",
        "tensorboard",
        reported=True,
    ),
    *_extra_packages("ray", "cluster.engine=ray and generation.backend=vllm are refused", "ray"),
    *_extra_packages(
        "serve",
        "servers, reward.kind=server and environment.kind=endpoint are refused",
        *("fastapi", "uvicorn", "httpx"),
    ),
    *_extra_packages("gguf", "GGUF files are refused", "gguf"),
    *_extra_packages("math", "the verifier aligner.rewards.math_verify is refused", "math_verify"),
    *_extra_packages("parquet", "Parquet files are refused", "pyarrow"),
    *_extra_packages("tasks", "the tasks of reasoning-gym are refused", "reasoning_gym"),
)


def require_extra(extra: str, purpose: str) -> None:
    """Raise `MissingPackageError` if a package of the extra (pyproject.toml) is not installed.

    ``purpose``: what needs the packages, as the subject of the message.
    """
    packages = [package for package in OPTIONAL_PACKAGES if package.extra == extra]
    missing = [package.name for package in packages if not _is_installed(package)]
    if missing:
        raise MissingPackageError(
            f"{purpose} needs {', '.join(missing)}, which is not installed. Run: "
            f"{packages[0].install}"
        )


# Supported versions, from the first up to but not including the second, as in pyproject.toml.
SUPPORTED = {"torch": ((2, 10), (2, 14)), "megatron-core": ((0, 16), (0, 17))}
# Tested versions. The start-up report lists packages with other versions.
TRIED = {
    "nemo-toolkit": ((3, 0), (3, 1)),
    "transformers": ((5, 16), (6,)),
    "ray": ((2, 52), (3,)),
    "transformer_engine": ((2, 9), (2, 12)),
}


def check_versions(installed: Callable[[str], str | None] | None = None) -> None:
    """Raise `VersionError` if a package in `SUPPORTED` is installed in an unsupported version.

    ``installed``: function from a package's name to its version, by default of this environment. A
    pre-release counts as its release, because NVIDIA's images contain pre-releases of torch.
    """
    for name, version, low, high in _outside(SUPPORTED, installed or _version):
        raise VersionError(
            f"{name} {version} is installed, but {low} or newer, below {high}, is needed. Run: pip "
            f"install '{name}>={low},<{high}', or use an image with such a version (Dockerfile)"
        )


def untried_versions(installed: Callable[[str], str | None] | None = None) -> list[str]:
    """Return a message for each package in `TRIED` that is installed in an untested version."""
    return [
        f"{name} {version} is installed (tested: {low} or newer, below {high})"
        for name, version, low, high in _outside(TRIED, installed or _version)
    ]


def _outside(
    ranges: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    installed: Callable[[str], str | None],
) -> Iterator[tuple[str, str, str, str]]:
    """Yield (name, version, lowest, end) for each package whose version is not in its range."""
    for name, (first, end) in ranges.items():
        version = installed(name)
        if version is None:  # a package without metadata is accepted
            continue
        release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if not first <= release < end:
            yield name, version, ".".join(map(str, first)), ".".join(map(str, end))


@dataclass(frozen=True)
class PackageStatus:
    """Whether a package is installed, and its version, or None if unknown."""

    package: OptionalPackage
    is_installed: bool
    version: str | None = None


def find_packages(packages: tuple[OptionalPackage, ...] = OPTIONAL_PACKAGES) -> list[PackageStatus]:
    """Return the status of optional packages for the start-up report, without importing them."""
    found = [(package, _is_installed(package)) for package in packages]
    return [
        PackageStatus(package, is_installed, _version(package.name) if is_installed else None)
        for package, is_installed in found
        if not (is_installed and package.only_missing)
    ]


def _is_installed(package: OptionalPackage) -> bool:
    if package.alternative is not None and importlib.util.find_spec(package.alternative):
        return True
    spec = importlib.util.find_spec(package.name)
    if spec is None or package.submodule is None:
        return spec is not None
    # find_spec("apex.optimizers") would import apex. Search the package's files instead.
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    name = package.submodule
    return any((f / name).is_dir() or (f / f"{name}.py").is_file() for f in folders)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


_PACKAGES = (
    *("aligner", "torch", "megatron-core", "nemo-toolkit"),
    *("lightning", "transformers", "ray", "numpy"),
)


def describe_environment(device: str) -> dict[str, str]:
    """Return texts about the command, the machine and the versions of packages."""
    return {
        "command": shlex.join([os.path.basename(sys.executable), *sys.argv]),
        "device": device,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        **{package: _version(package) or "not installed" for package in _PACKAGES},
    }
