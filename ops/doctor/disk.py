"""The directory of the disk tier: its file system, direct I/O, how long a sync takes, how fast it writes and reads.

What is measured is bounded, in bytes and in time, and leaves nothing behind.
"""

import contextlib
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ops.cli.output import human_bytes
from ops.doctor.finding import Finding, fail, ok, warn
from ops.doctor.machine import Machine

TRIAL_BYTES = 64 << 20
TRIAL_S = 5.0  # of writing, and the same of reading
PIECE_BYTES = 4 << 20
NUM_SYNCS = 8
SLOW_SYNC_S = 0.05
SLOW_BYTES_PER_S = 200 << 20  # below it many prompts are computed faster than they are loaded
SCARCE_BYTES = 1 << 30
IN_MEMORY = {"tmpfs", "ramfs"}
REMOTE = {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "glusterfs", "lustre"}


def check_disk(directory: Path, quota_bytes: int | None, machine: Machine) -> Iterator[Finding]:
    """Everything about a directory that exists, or can be made."""
    place = _existing(directory)
    if not os.access(place, os.W_OK | os.X_OK):
        yield fail("disk", f"{place} cannot be written to", "another directory, or its owner: the daemon's own user")
        return
    yield _file_system(place, machine)
    yield _room(directory, place, quota_bytes)
    try:
        yield from _trial(place)
    except OSError as error:
        yield fail("disk", f"a trial in {place} failed: {error.strerror}", "see the system's log for the device")


def _existing(directory: Path) -> Path:
    """The directory, or the nearest one above it that is there."""
    return next(place for place in (directory, *directory.absolute().parents) if place.is_dir())


def _file_system(place: Path, machine: Machine) -> Finding:
    mount = machine.mount_of(place.resolve())
    if mount is None:
        return ok("file system", "unknown")
    found = f"{mount.kind} at {mount.point}"
    if mount.kind in IN_MEMORY:
        return warn("file system", found, "this is memory, and gone after a restart: use --host-bytes, or a real disk")
    if mount.kind in REMOTE:
        return warn(
            "file system", found, "use a local disk: locks, syncs and speed of a remote one are not what it needs"
        )
    if mount.kind == "overlay":
        return warn("file system", found, "a container's own layer: mount a volume")
    return ok("file system", found)


def _room(directory: Path, place: Path, quota_bytes: int | None) -> Finding:
    stat = os.statvfs(place)
    free = stat.f_bavail * stat.f_frsize
    own = (
        sum(file.stat().st_blocks * 512 for file in directory.iterdir() if file.is_file()) if directory.is_dir() else 0
    )
    wanted = max(0, (quota_bytes or 0) - own)
    found = f"{human_bytes(free)} free" + (f", {human_bytes(wanted)} more may be taken" if quota_bytes else "")
    if free < wanted:
        return warn(
            "disk space", found, "a smaller --disk-bytes, or a larger disk: the tier stops to take when it is full"
        )
    if free < SCARCE_BYTES:
        return warn("disk space", found, "free some: less than 1 GiB holds few prefixes")
    return ok("disk space", found)


def _trial(place: Path) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(prefix=".downcore-doctor-", dir=place) as folder:
        path = Path(folder, "trial")
        is_direct = _takes_direct(path)
        if is_direct:
            yield ok("direct I/O", "yes")
        else:
            yield warn("direct I/O", "refused", "ext4 or xfs: without it the page cache holds everything twice")
        yield _sync_time(Path(folder, "sync"))
        written, write_s, read_s = _speed(path, is_direct=is_direct)
        yield _pace("disk writes", written, write_s)
        yield _pace("disk reads", written, read_s)


def _takes_direct(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        path.touch(0o600)
        return False
    return True


def _sync_time(path: Path) -> Finding:
    times: list[float] = []
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        began = time.monotonic()
        while len(times) < NUM_SYNCS and time.monotonic() - began < TRIAL_S:
            os.pwrite(file, os.urandom(4096), 4096 * len(times))
            start = time.perf_counter()
            os.fsync(file)
            times.append(time.perf_counter() - start)
    finally:
        os.close(file)
    median = statistics.median(times)
    found = f"{median * 1000:.1f} ms, the slowest of {len(times)} {max(times) * 1000:.1f} ms"
    if median > SLOW_SYNC_S:
        return warn(
            "fsync", found, "another disk: every commit waits for one, and warming with --durable for all of them"
        )
    return ok("fsync", found)


def _speed(path: Path, *, is_direct: bool) -> tuple[int, float, float]:
    """Bytes written and read again, and the seconds of each; the bytes are fewer where time was over."""
    flags = os.O_DIRECT if is_direct else 0
    buffer = mmap.mmap(-1, PIECE_BYTES)  # aligned as direct I/O wants it
    buffer.write(os.urandom(PIECE_BYTES))
    file = os.open(path, os.O_RDWR | flags)
    try:
        written, began = 0, time.perf_counter()
        while written < TRIAL_BYTES and time.perf_counter() - began < TRIAL_S:
            written += os.pwritev(file, [buffer], written)
        os.fsync(file)
        write_s = time.perf_counter() - began
        with contextlib.suppress(OSError):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        at, began = 0, time.perf_counter()
        while at < written and time.perf_counter() - began < TRIAL_S:
            at += os.preadv(file, [buffer], at)
        read_s = (time.perf_counter() - began) * written / max(at, 1)
    finally:
        os.close(file)
        buffer.close()
    return written, write_s, read_s


def _pace(name: str, num_bytes: int, seconds: float) -> Finding:
    per_s = num_bytes / max(seconds, 1e-9)
    found = f"{human_bytes(int(per_s))}/s over {human_bytes(num_bytes)}"
    if per_s < SLOW_BYTES_PER_S:
        return warn(name, found, "a faster disk; prefixes that load slower than they are computed are not loaded")
    return ok(name, found)
