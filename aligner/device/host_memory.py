"""Host memory: available bytes, large allocations, and settings of the C library.

glibc maps every large allocation anew, which causes a page fault for each page of a new tensor, or
on its heap does not reuse freed aligned blocks. Large tensors therefore use `pages.cpp`.
"""

import contextlib
import ctypes
import functools
import mmap
import platform
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from aligner.device.native import compiled
from aligner.errors import NativeCodeError

_CGROUPS = Path("/sys/fs/cgroup")

# <malloc.h>
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


@functools.cache
def keep_freed_memory() -> bool:
    """Make glibc keep freed blocks below 1 GiB for reuse. Return False without glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    settings = {_M_MMAP_THRESHOLD: 1 << 30, _M_TRIM_THRESHOLD: -1, _M_TOP_PAD: 64 << 20}
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        return all(mallopt(name, value) for name, value in settings.items())
    return False


@functools.cache
def reuse_pages() -> str | None:
    """Make torch reuse freed memory of tensors of 1 MiB and more. Return why not, or None."""
    if platform.system() != "Linux":
        return f"not on {platform.system()}"
    try:
        library = ctypes.CDLL(str(compiled(Path(__file__).with_name("pages.cpp"))))
    except (NativeCodeError, OSError) as error:
        return str(error)
    library.serve()
    return None


class _Mapped(mmap.mmap):
    """Memory map. Calls ``unlock``, if set, before the memory is freed."""

    unlock: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


def private_memory(size: int, extra_flags: int = 0) -> memoryview:
    """Allocate ``size`` bytes of zeros with mmap. They are freed with their last view."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | extra_flags
    return memoryview(_Mapped(-1, max(1, size), flags=flags))


def resident_bytes() -> int:
    """Return the bytes of this process's resident host memory."""
    return psutil.Process().memory_info().rss


def peak_resident_bytes() -> int:
    """Return the peak of `resident_bytes` since `reset_peak_resident`, or since the start."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10
    return peak


def reset_peak_resident() -> bool:
    """Reset `peak_resident_bytes`. Return False if the system does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def total_bytes() -> int:
    """Return the bytes of host memory, or the limit of a control group if this is smaller."""
    limits = []
    for group in _groups():
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((group / "memory.max").read_text()))  # "max": no limit
    return min([psutil.virtual_memory().total, *limits])


def available_bytes() -> int:
    """Return the bytes of host memory that this process can still allocate, within its cgroups."""
    available = [psutil.virtual_memory().available]
    for group in _groups():
        with contextlib.suppress(OSError, ValueError, KeyError):
            limit = int((group / "memory.max").read_text())  # "max": no limit
            used = int((group / "memory.current").read_text())
            statistics = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
            available.append(limit - used + int(statistics["inactive_file"]))
    return max(0, min(available))


def _groups() -> Iterator[Path]:
    """Yield the folder of this process's control group (cgroup v2) and of each parent group."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        name = next(line[3:] for line in lines if line.startswith("0::"))
    except (OSError, StopIteration):
        return
    folder = _CGROUPS / name.lstrip("/")
    for group in (folder, *folder.parents):
        if group == _CGROUPS.parent:
            return
        yield group
