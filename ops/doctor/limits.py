"""What the system allows: files, locked memory, cgroups, large pages, swap; the clock; the socket's place."""

import ctypes
import os
import resource
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from ops.cli.output import human_bytes
from ops.doctor.finding import Finding, fail, ok, warn
from ops.doctor.machine import Machine

LEAST_FILES = 1024
ENOUGH_FILES = 8192
MAX_SOCKET_BYTES = 107
SLOW_CLOCKS = {"hpet", "acpi_pm", "jiffies"}
_STA_UNSYNC = 0x40
_TIME_ERROR = 5


def check_files() -> Finding:
    """How many files the daemon may have open: two for each connection, a few for each segment."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_count(soft)} files, at most {_count(hard)}"
    if soft < LEAST_FILES and soft != resource.RLIM_INFINITY:
        return fail("open files", found, "ulimit -n 8192, or LimitNOFILE=8192 in the unit")
    if soft < ENOUGH_FILES and soft != resource.RLIM_INFINITY:
        return warn("open files", found, "ulimit -n 8192, or LimitNOFILE=8192 in the unit, for many connections")
    return ok("open files", found)


def check_locked_memory(host_bytes: int, *, has_card: bool) -> Finding:
    """A card's driver pins the host tier's memory, for which some systems need this limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "no limit" if soft == resource.RLIM_INFINITY else human_bytes(soft)
    if has_card and soft != resource.RLIM_INFINITY and soft < host_bytes:
        return warn("locked memory", found, "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit")
    return ok("locked memory", found)


def check_memory(machine: Machine, wanted_bytes: int) -> Iterator[Finding]:
    """What there is, what the cgroup leaves, and what the settings take of it at start-up."""
    memory = machine.memory_bytes()
    total, available = memory.get("MemTotal", 0), memory.get("MemAvailable", 0)
    limit = machine.cgroup_limit_bytes()
    capped = limit is not None and limit < total
    room = min(available, limit) if limit is not None else available
    found = f"{human_bytes(available)} available of {human_bytes(total)}"
    if capped and limit is not None:
        found += f", cgroup limit {human_bytes(limit)}"
    if wanted_bytes > room:
        what = f"{found}; the settings take {human_bytes(wanted_bytes)}"
        yield fail("memory", what, "smaller --pool-bytes and --host-bytes, or a larger limit")
    else:
        yield ok("memory", found)
    swap = memory.get("SwapTotal", 0)
    if swap and memory.get("SwapFree", swap) < swap // 2:
        yield warn("swap", f"{human_bytes(swap)}, half of it in use", "a tier in swap is slower than none: free memory")
    else:
        yield ok("swap", human_bytes(swap) if swap else "none")
    huge = machine.chosen("/sys/kernel/mm/transparent_hugepage/enabled")
    if huge == "never":
        advice = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: decoding reads all weights for each token"
        yield warn("large pages", huge, advice)
    else:
        yield ok("large pages", huge or "unknown")


def check_cores(machine: Machine) -> Finding:
    """Cores that the process may use, and what its cgroup allows of them."""
    cores, quota = len(os.sched_getaffinity(0)), machine.cpu_quota()
    if quota is not None and quota < cores:
        found = f"{cores} cores, cgroup quota {quota:g}"
        return warn("cores", found, f"--threads {max(1, int(quota))}: threads beyond the quota stall each other")
    return ok("cores", f"{cores}")


def check_clock(machine: Machine) -> Iterator[Finding]:
    """The clock that steps are timed with, and whether the time of day is kept by somebody."""
    resolution = time.get_clock_info("monotonic").resolution
    source = machine.text("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    found = f"{source or 'unknown source'}, resolution {resolution * 1e9:.0f} ns"
    if source in SLOW_CLOCKS:
        yield warn("clock", found, "a tsc or kvm-clock source: reading this one takes microseconds")
    else:
        yield ok("clock", found)
    synchronised = is_synchronised()
    if synchronised is False:
        yield warn(
            "time of day", "not synchronised", "chrony or systemd-timesyncd: times to live and certificates need it"
        )
    else:
        yield ok("time of day", "synchronised" if synchronised else "unknown")


def check_socket(listen: str) -> Finding:
    """Where the daemon would listen."""
    path = Path(listen.removeprefix("unix:")).absolute()
    if len(os.fsencode(path)) > MAX_SOCKET_BYTES:
        return fail("socket", str(path), f"a path of at most {MAX_SOCKET_BYTES} bytes: --listen")
    folder = path.parent
    if not folder.exists():
        return ok("socket", f"{path}, to be made")
    found = folder.stat()
    mode = stat.S_IMODE(found.st_mode)
    if not os.access(folder, os.W_OK | os.X_OK):
        return fail("socket", f"{folder} cannot be written to", "--listen in a directory of the daemon's own user")
    if found.st_uid != os.getuid():
        return fail("socket", f"{folder} belongs to another user", "--listen in a directory of the daemon's own user")
    if mode & 0o077:  # daemon/front/sockets.py refuses it
        return fail(
            "socket", f"{folder} has mode {mode:o}", f"chmod 700 {folder}, or --listen in a directory of its own"
        )
    return ok("socket", str(path))


def is_synchronised() -> bool | None:
    """What the kernel says of the time of day (adjtimex(2)); None where it does not say."""
    buffer = (ctypes.c_byte * 512)()  # struct timex with mode 0: nothing is changed; its size differs by machine
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(buffer))
    except (AttributeError, OSError):
        return None
    if state < 0:
        return None
    status = ctypes.cast(buffer, ctypes.POINTER(ctypes.c_int))[_STATUS_AT // ctypes.sizeof(ctypes.c_int)]
    return state != _TIME_ERROR and not status & _STA_UNSYNC


class _Timex(ctypes.Structure):
    """The beginning of struct timex, as the kernel's headers have it."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
    ]


_STATUS_AT = _Timex.status.offset


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"
