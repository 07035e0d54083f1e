"""C++ files of the library, compiled over PyTorch's headers where they are needed, once a version.

Imports nothing of PyTorch: the dry device's guard must be known before PyTorch looks for one.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from aligner.errors import NativeCodeError


def torch_home() -> Path:
    """The folder of the installed PyTorch; `NativeCodeError` where there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NativeCodeError("torch is not installed; `make setup` installs it")
    return Path(spec.origin).parent


def compiled(source: Path) -> Path:
    """A shared library of one C++ file, from the cache where it is there already.

    The cache is ``aligner`` below ``XDG_CACHE_HOME``, default ``~/.cache``. Raises
    `NativeCodeError` where the library cannot be made.
    """
    home = torch_home()
    version = importlib.metadata.version("torch")
    digest = hashlib.sha256(source.read_bytes() + version.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aligner"
    target = cache / f"{source.stem}_{digest}.so"
    if target.exists():
        return target
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        raise NativeCodeError("there is no C++ compiler; install g++, or set CXX")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / target.name
            _compile(compiler, source, home, made)
            os.replace(made, target)  # another process may have been as quick
    except OSError as error:
        raise NativeCodeError(f"{cache} cannot be written ({error}); set XDG_CACHE_HOME") from error
    return target


def _compile(compiler: str, source: Path, home: Path, target: Path) -> None:
    done = subprocess.run(
        [
            compiler,
            *("-std=c++20", "-O1", "-fPIC", "-shared"),
            *("-I", str(home / "include"), str(source)),
            *("-L", str(home / "lib"), "-lc10", "-ltorch_cpu", "-o", str(target)),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        raise NativeCodeError(f"{compiler} could not compile {source.name}:\n{done.stderr[-2000:]}")
