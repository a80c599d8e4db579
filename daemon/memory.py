"""Keeps a process's resident memory flat: the C allocator's settings, and what the collector need not look at again.

By default glibc opens an arena for each thread, and raises the size from which memory is mapped and returned at once,
so that after a burst much of it stays. The front fixes both before its first thread is made. The engine does not: its
forwards take and return tensors of some MiB all the time, which would be new pages each time. Both processes return
what is free when nothing is going on.
"""

import ctypes
import gc

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def bound_allocator() -> bool:
    """One arena, early return of memory. Returns: whether the C library knows these settings."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, 128 << 10), (_M_TRIM_THRESHOLD, 1 << 20))
    return all(mallopt(name, value) == 1 for name, value in settings)


def trim() -> None:
    """Returns what the allocator keeps free to the system. A few milliseconds: for when nothing is going on."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def settle() -> None:
    """Called once everything is loaded: what lives now lives on, and is not collected again."""
    gc.collect()
    gc.freeze()
