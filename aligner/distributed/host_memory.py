"""Let the C library keep the host memory it has been given.

glibc maps every large allocation afresh and returns it when it is freed, so a tensor of some MB
costs a page fault for each of its pages, every time one is made.
"""

import contextlib
import ctypes
import functools
import platform

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
