"""Progress bars: on stderr where that is a terminal, and nothing at all elsewhere."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ops.cli.output import make_console

REFRESH_HZ = 8


class Bars(Protocol):
    """Named bars; one appears when it is first shown."""

    def show(self, name: str, done: int, total: int, text: str) -> None: ...


class _Drawn:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def show(self, name: str, done: int, total: int, text: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total, text=text)
        self._progress.update(self._tasks[name], completed=done, total=total, text=text)


class _Silent:
    def show(self, name: str, done: int, total: int, text: str) -> None:
        pass


@contextmanager
def bars() -> Generator[Bars]:
    """Bars that are gone at the end, so that only the result stays."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield _Silent()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, transient=True, refresh_per_second=REFRESH_HZ) as progress:
        yield _Drawn(progress)
