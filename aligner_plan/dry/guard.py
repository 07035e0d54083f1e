"""The device guard of the dry device: compiled once per version of PyTorch, then loaded.

Imports nothing of PyTorch: the guard must be loaded before PyTorch looks for one.
"""

import ctypes
import functools
import sys
from pathlib import Path

from aligner.device.native import compiled, torch_home
from aligner.errors import DryDeviceError, NativeCodeError


@functools.cache
def load_guard() -> None:
    """Let PyTorch accept ``device="cuda"`` in this process. Call it before torch is imported.

    Later calls do nothing.

    Raises:
        DryDeviceError: torch is already imported or is built for GPUs (and contains a guard), or
            no C++ compiler was found.
    """
    if "torch" in sys.modules:
        raise DryDeviceError(
            "the dry device must be loaded before torch. Call load_guard() first in a new process"
        )
    try:
        home = torch_home()
        if (home / "lib" / "libtorch_cuda.so").exists():
            raise DryDeviceError(
                "the dry device needs a CPU build of torch, because a GPU build already contains a "
                "device guard"
            )
        library = compiled(Path(__file__).with_name("guard.cpp"))
    except NativeCodeError as error:
        raise DryDeviceError(f"the dry device: {error}") from error
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(home / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
