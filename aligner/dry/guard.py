"""The device guard of a GPU that is not there: compiled once per version of PyTorch, then loaded.

Imports nothing of PyTorch: the guard must be known before PyTorch looks for one.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from aligner.errors import DryDeviceError

_SOURCE = Path(__file__).with_name("guard.cpp")


def load_guard() -> None:
    """Make ``device="cuda"`` known to PyTorch in this process; call before torch is imported.

    Raises `DryDeviceError` where torch is imported already, where it is a build for GPUs (which has
    a guard of its own), or where there is no C++ compiler.
    """
    if "torch" in sys.modules:
        raise DryDeviceError(
            "the dry device must be loaded before torch; call load_guard() first in a new process"
        )
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise DryDeviceError("torch is not installed; `make setup` installs it")
    home = Path(spec.origin).parent
    if (home / "lib" / "libtorch_cuda.so").exists():
        raise DryDeviceError(
            "the dry device needs a CPU build of torch; this one is built for GPUs and brings a "
            "device guard of its own"
        )
    library = compiled(_SOURCE, home)
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(home / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def compiled(source: Path, torch_home: Path) -> Path:
    """A library of one C++ file over PyTorch's, from the cache where it is there already.

    ``torch_home``: the folder of the package. Raises `DryDeviceError` where it cannot be made.
    """
    version = importlib.metadata.version("torch")
    digest = hashlib.sha256(source.read_bytes() + version.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aligner"
    target = cache / f"{source.stem}_{digest}.so"
    if target.exists():
        return target
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        raise DryDeviceError("the dry device needs a C++ compiler; install g++, or set CXX")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        made = Path(folder) / target.name
        done = subprocess.run(
            [
                compiler,
                *("-std=c++20", "-O1", "-fPIC", "-shared"),
                *("-I", str(torch_home / "include"), str(source)),
                *("-L", str(torch_home / "lib"), "-lc10", "-ltorch_cpu", "-o", str(made)),
            ],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode:
            raise DryDeviceError(
                f"{compiler} could not compile {source.name}:\n{done.stderr[-2000:]}"
            )
        os.replace(made, target)  # another process may have been as quick
    return target
