"""The system's own files, read from a root that a test may move: /proc, /sys, cgroups."""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mount:
    """Where a file system hangs, and of what kind it is."""

    point: str
    kind: str


class Machine:
    """Reads /proc and /sys. What a kernel does not have is None."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def text(self, path: str) -> str | None:
        """A small file's text, stripped."""
        try:
            return (self._root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return None

    def memory_bytes(self) -> dict[str, int]:
        """/proc/meminfo, in bytes."""
        lines = (self.text("/proc/meminfo") or "").splitlines()
        found = (re.match(r"(\S+):\s+(\d+)( kB)?", line) for line in lines)
        return {m[1]: int(m[2]) * (1024 if m[3] else 1) for m in found if m}

    def cgroup_limit_bytes(self) -> int | None:
        """The least memory limit of this process's cgroups, v2 or v1; None where there is none."""
        paths: list[str] = []
        for line in (self.text("/proc/self/cgroup") or "").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                paths += [f"/sys/fs/cgroup{above}/memory.max" for above in _upwards(path)]
            elif "memory" in controllers.split(","):
                paths += [f"/sys/fs/cgroup/memory{above}/memory.limit_in_bytes" for above in _upwards(path)]
        limits = [int(text) for path in paths if (text := self.text(path)) is not None and text.isdigit()]
        real = [limit for limit in limits if limit < 1 << 60]  # v1 says "none" with a very large number
        return min(real, default=None)

    def cpu_quota(self) -> float | None:
        """How many cores the cgroup may use; None for all."""
        for line in (self.text("/proc/self/cgroup") or "").splitlines():
            _, controllers, path = line.split(":", 2)
            for above in _upwards(path) if not controllers else ():
                words = (self.text(f"/sys/fs/cgroup{above}/cpu.max") or "").split()
                if len(words) == 2 and words[0].isdigit():
                    return int(words[0]) / int(words[1])
        return None

    def mount_of(self, path: Path) -> Mount | None:
        """The file system that a path lies on."""
        best: Mount | None = None
        for line in (self.text("/proc/self/mountinfo") or "").splitlines():
            before, _, after = line.partition(" - ")
            fields = before.split()
            if len(fields) < 5 or not after:
                continue
            point = fields[4].replace("\\040", " ")
            if path.is_relative_to(point) and (best is None or len(point) >= len(best.point)):
                best = Mount(point, after.split()[0])
        return best

    def chosen(self, path: str) -> str | None:
        """The word in brackets of a file like `always [madvise] never`."""
        found = re.search(r"\[(\w+)\]", self.text(path) or "")
        return found[1] if found else None


def _upwards(path: str) -> list[str]:
    """The cgroup's own path and all above it; the root is the empty one."""
    parts = [part for part in path.split("/") if part]
    return ["".join(f"/{part}" for part in parts[:length]) for length in range(len(parts), -1, -1)]
