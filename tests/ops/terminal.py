"""A command line at a terminal of its own: what a person would see and type."""

import os
import pty
import re
import sys
from pathlib import Path

_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]")


def at_terminal(server: Path, *arguments: str, typed: str = "", columns: int = 120) -> tuple[int, str]:
    """Runs `downcore` in a terminal: the exit code, and all that was shown, without its colours."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"DOWNCORE_SERVER": str(server), "COLUMNS": str(columns), "TERM": "xterm", "TTY_COMPATIBLE": "1"}
        os.execv(sys.executable, [sys.executable, "-m", "ops", *arguments])
    shown = bytearray()
    answered = not typed
    while True:
        try:
            piece = os.read(terminal, 1 << 16)
        except OSError:  # how the end of a terminal looks
            break
        if not piece:
            break
        shown += piece
        if not answered and b"[y/N]: " in shown:  # whole, so that what is typed is not echoed inside it
            os.write(terminal, typed.encode() + b"\n")
            answered = True
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), _ESCAPES.sub(b"", bytes(shown)).decode().replace("\r\n", "\n")
