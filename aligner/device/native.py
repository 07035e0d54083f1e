"""Compile the library's C++ files against PyTorch's headers, once per version of PyTorch.

This module does not import torch, because the dry device must be loaded before it.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from aligner.errors import NativeCodeError, raised_as


def torch_home() -> Path:
    """Return the folder of the installed PyTorch. Raises `NativeCodeError` if there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NativeCodeError("torch is not installed. `make setup` installs it")
    return Path(spec.origin).parent


def compiled(source: Path) -> Path:
    """Return the path of the shared library for a C++ file, which is compiled unless cached.

    The cache is ``$XDG_CACHE_HOME/aligner``, by default ``~/.cache/aligner``. Raises
    `NativeCodeError` if there is no compiler, or compiling fails.
    """
    # Reuse a library that was compiled from the same source with the same version of torch.
    home = torch_home()
    version = importlib.metadata.version("torch")
    digest = hashlib.sha256(source.read_bytes() + version.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aligner"
    cached_library = cache / f"{source.stem}_{digest}.so"
    if cached_library.exists():
        return cached_library
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        raise NativeCodeError("no C++ compiler was found. Install g++, or set CXX")
    # Compile into a separate folder, because other processes may compile at the same time.
    problem = f"{cache} cannot be written"
    with raised_as(NativeCodeError, problem, OSError, remedy="set XDG_CACHE_HOME"):
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            library = Path(folder) / cached_library.name
            flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-I", str(home / "include")]
            libraries = ["-L", str(home / "lib"), "-lc10", "-ltorch_cpu"]
            command = [compiler, *flags, str(source), *libraries, "-o", str(library)]
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=300, check=False
            )
            if result.returncode:
                raise NativeCodeError(
                    f"{compiler} could not compile {source.name}:\n{result.stderr[-2000:]}"
                )
            os.replace(library, cached_library)
    return cached_library
