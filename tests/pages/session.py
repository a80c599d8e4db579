"""A shell in which a page's commands are typed, in a folder that looks like a clone of the repository."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tests.front.harness import eventually
from tests.pages.blocks import ROOT, Typed
from tests.pages.shown import Shown

STARTS_S = 120
LINKED = ("proto", "LICENSE", "README.md", "ops/models", "ops/demo", "ops/docs", "ops/deploy")
COPIED = ("ops/examples",)  # node_modules and built programs come here


def make_clone(folder: Path) -> Path:
    """What the pages' commands name of the repository, with `downcore` and `python` in .venv/bin."""
    for name in LINKED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(ROOT / name)
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("node_modules", "__pycache__"))
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    python = shlex.quote(sys.executable)
    for name, command in (("downcore", f"{python} -m ops"), ("python", python)):
        (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (programs / name).chmod(0o700)
    (programs / "activate").write_text(f"PATH={shlex.quote(str(programs))}:$PATH\n")
    return folder


class Session:
    """One bash, whose directory and variables last; output and error come together, as on a terminal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shown = Shown()
        self._out = folder / "typed.out"
        self._served = folder / "served.out"
        self._log = folder / "served.err"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DOWNCORE_")}
        environment = {**kept, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "HOME": str(folder), "COLUMNS": "200"}
        self._bash = subprocess.Popen(
            ["bash", "--norc", "--noprofile"], cwd=folder, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def type(self, typed: Typed) -> None:
        """Types a command; fails where it prints anything but what its page shows."""
        command = self.shown.typed(typed.command)
        if command.startswith("downcore serve "):
            self._served.touch()
            self._say(f"{command} >{self._served} 2>{self._log} </dev/null & served=$!")
            eventually(lambda: self._served.read_text().endswith("\n") or not self._serves(), STARTS_S)
            printed = self._served.read_text()
            assert printed, f"{typed.place}: the daemon does not start:\n{self._log.read_text()[-2000:]}"
        else:
            self._say(f"{{ {command}\n}} >{self._out} 2>&1 </dev/null")
            printed = self._out.read_text()
        expected = "\n".join(typed.shown)
        matches = self.shown.matches(typed.shown, printed)
        assert matches, f"{typed.place}: {command}\n--- the page shows\n{expected}\n--- it printed\n{printed}"

    def close(self) -> None:
        """Ends the daemon, which must end in order, and the shell."""
        status = self._say('kill -TERM "$served"; wait "$served"')
        self._bash.communicate(timeout=10)
        assert status == 0, self._log.read_text()[-2000:]

    def _serves(self) -> bool:
        return self._say('kill -0 "$served"') == 0

    def _say(self, line: str) -> int:
        """The exit status of what is said."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._bash.stdin.write(f"{line}\necho $?\n")
        self._bash.stdin.flush()
        return int(self._bash.stdout.readline())
