"""The fenced blocks of a page, and the commands and outputs of those that show a terminal."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "ops" / "docs").glob("*.md")))


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: its language, and its text without the fences."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


@dataclass(frozen=True, slots=True)
class Typed:
    """A command of a `console` block, and the lines that the page shows below it."""

    place: str
    command: str
    shown: tuple[str, ...]


def blocks_of(page: Path) -> Iterator[Block]:
    """Every fenced block of a page, in order. Fails where one is not closed."""
    lines = page.read_text(encoding="utf-8").splitlines()
    begin: int | None = None
    for number, line in enumerate(lines):
        if line.startswith("```") and begin is None:
            begin = number
        elif line.startswith("```"):
            assert begin is not None
            assert line == "```", f"{page.name}:{number + 1}: a fence ends a block, or opens one in another"
            yield Block(page, begin + 1, lines[begin].removeprefix("```"), "\n".join(lines[begin + 1 : number]) + "\n")
            begin = None
    assert begin is None, f"{page.name}:{begin}: a block without an end"


def typed_in(page: Path) -> list[Typed]:
    """What the page's `console` blocks type: lines after `$ `, continued by a backslash. The others are output."""
    found: list[Typed] = []
    for block in blocks_of(page):
        if block.language != "console":
            continue
        lines = block.text.splitlines()
        starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
        assert starts[:1] == [0], f"{block.place}: a console block begins with a command"
        for start, end in zip(starts, (*starts[1:], len(lines)), strict=True):
            last = start
            while lines[last].endswith("\\"):
                last += 1
            command = "\n".join((lines[start].removeprefix("$ "), *lines[start + 1 : last + 1]))
            found.append(Typed(f"{page.name}:{block.line + 1 + start}", command, tuple(lines[last + 1 : end])))
    return found
