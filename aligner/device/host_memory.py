"""Host memory: how much is left, how to take much of it, and how the C library keeps it.

glibc maps every large allocation afresh and returns it when it is freed, so a tensor of some MB
costs a page fault for each of its pages, every time one is made. Kept on its heap, aligned blocks
do not serve twice. So large tensors have an allocator of their own, where it can be compiled.
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
    """Serve allocations below 1 GiB from the heap and never shrink it. Idempotent.

    Returns whether that was done: another C library than glibc has no such setting.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    settings = {_M_MMAP_THRESHOLD: 1 << 30, _M_TRIM_THRESHOLD: -1, _M_TOP_PAD: 64 << 20}
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        return all(mallopt(name, value) for name, value in settings.items())
    return False


@functools.cache
def reuse_pages() -> str | None:
    """Serve tensors of 1 MiB and more from pages that freed ones left (`pages.cpp`). Idempotent.

    PyTorch must be imported. Returns why that was not done: no compiler, another system; else None.
    """
    if platform.system() != "Linux":
        return f"not on {platform.system()}"
    try:
        library = ctypes.CDLL(str(compiled(Path(__file__).with_name("pages.cpp"))))
    except (NativeCodeError, OSError) as error:
        return str(error)
    library.serve()
    return None


class _Mapped(mmap.mmap):
    """Memory of the system; ``unlock`` is called before it goes back."""

    unlock: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


def private_memory(size: int, further_flags: int = 0) -> memoryview:
    """``size`` bytes of zeros from the system itself; they go back when their last view is gone.

    Large pages are not requested: where memory is fragmented, waiting for them takes longer.
    ``further_flags``: of ``mmap``.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | further_flags
    return memoryview(_Mapped(-1, max(1, size), flags=flags))


def resident_bytes() -> int:
    """Host memory that this process holds now."""
    return psutil.Process().memory_info().rss


def peak_resident_bytes() -> int:
    """The most that it held since `reset_peak_resident`, or where that failed, since it began."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10
    return peak


def reset_peak_resident() -> bool:
    """Begin anew with what is held now; False where the system does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def total_bytes() -> int:
    """Host memory that this process could ever have: of the machine, and of its control group."""
    limits = []
    for group in _groups():
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((group / "memory.max").read_text()))  # "max": there is none
    return min([psutil.virtual_memory().total, *limits])


def available_bytes() -> int:
    """Host memory that this process can still take: of the machine, and of its control group."""
    return max(0, min([psutil.virtual_memory().available, *_left_in_groups()]))


def _left_in_groups() -> Iterator[int]:
    """Memory that the control groups above this process still allow.

    Pages of files that can be dropped do not count as taken.
    """
    for group in _groups():
        with contextlib.suppress(OSError, ValueError, KeyError):
            limit = int((group / "memory.max").read_text())  # "max": there is none
            taken = int((group / "memory.current").read_text())
            statistics = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
            yield limit - taken + int(statistics["inactive_file"])


def _groups() -> Iterator[Path]:
    """Folders of the control groups (version 2) above this process, a container's included."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line[3:] for line in lines if line.startswith("0::"))
    except (OSError, StopIteration):
        return
    folder = _CGROUPS / own.lstrip("/")
    for group in (folder, *folder.parents):
        if group == _CGROUPS.parent:
            return
        yield group
