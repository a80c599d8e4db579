"""Starts the front as `python -m daemon` does, but with the scripted engine: `launch.py ENGINE_ARGS... -- FLAGS...`.

SIGUSR1 makes it log what it has allocated, once all garbage is collected: bytes from the C library, and the
interpreter's own blocks.
"""

import ctypes
import gc
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from daemon.__main__ import run
from daemon.front.command_line import parse_args

SCRIPTED = Path(__file__).parents[1] / "engines" / "scripted.py"
_FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip


class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def report(*_: object) -> None:
    """One line on stderr: `allocated: BYTES BLOCKS`."""
    gc.collect()
    libc: Any = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo
    found = libc.mallinfo2()
    print(f"allocated: {found.uordblks + found.hblkhd} {sys.getallocatedblocks()}", file=sys.stderr, flush=True)


def main() -> int:
    signal.signal(signal.SIGUSR1, report)
    cut = sys.argv.index("--")
    command = (sys.executable, str(SCRIPTED), *sys.argv[1:cut])
    return run(msgspec.structs.replace(parse_args(sys.argv[cut + 1 :]), engine_command=command))


if __name__ == "__main__":
    sys.exit(main())
