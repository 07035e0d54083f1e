"""Versions and machine of a run, for its records. No environment variables: they hold secrets."""

import importlib.metadata
import os
import platform
import shlex
import sys

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
    found = {
        "command": shlex.join([os.path.basename(sys.executable), *sys.argv]),
        "device": device,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
