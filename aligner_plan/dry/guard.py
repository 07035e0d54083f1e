"""The device guard of a GPU that is not there: compiled once per version of PyTorch, then loaded.

Imports nothing of PyTorch: the guard must be known before PyTorch looks for one.
"""

import ctypes
import functools
import sys
from pathlib import Path

from aligner.device.native import compiled, torch_home
from aligner.errors import DryDeviceError, NativeCodeError

_SOURCE = Path(__file__).with_name("guard.cpp")


@functools.cache
def load_guard() -> None:
    """Make ``device="cuda"`` known to PyTorch in this process; call before torch is imported.

    Further calls do nothing.

    Raises `DryDeviceError` where torch is imported already, where it is a build for GPUs (which has
    a guard of its own), or where there is no C++ compiler.
    """
    if "torch" in sys.modules:
        raise DryDeviceError(
            "the dry device must be loaded before torch; call load_guard() first in a new process"
        )
    try:
        home = torch_home()
        if (home / "lib" / "libtorch_cuda.so").exists():
            raise DryDeviceError(
                "the dry device needs a CPU build of torch; this one is built for GPUs and brings "
                "a device guard of its own"
            )
        library = compiled(_SOURCE)
    except NativeCodeError as error:
        raise DryDeviceError(f"the dry device: {error}") from error
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(home / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
