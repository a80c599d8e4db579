"""Whether a command line that stands in a file would be understood: parsed by the command's own parser, and not run."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from daemon.front.command_line import read
from ops.cli.main import COMMANDS, load


def check_command(words: list[str]) -> None:
    """Raises where `downcore ...` or `downcored ...` is not understood: a command, an option or an argument of it."""
    program, *arguments = words
    if program == "downcored":
        read(arguments, {})
        return
    assert program == "downcore", f"{program} is no program of this project"
    name, *rest = arguments
    assert name in COMMANDS, f"no command {name!r}"
    if name == "serve":
        read(rest, {})
    elif name == "version":
        assert not rest
    else:
        _parse(get_command(load(name).app), name, rest)


def commands_in(text: str, *, program: str = "downcore") -> Iterator[list[str]]:
    """The command lines of a page: those that begin with the program's name in its indented or fenced blocks."""
    lines = iter(text.splitlines())
    is_fenced = False
    for line in lines:
        if line.startswith("```"):
            is_fenced = not is_fenced
            continue
        if not is_fenced:
            continue
        whole = line.removeprefix("$ ")
        while whole.endswith("\\"):
            whole = whole[:-1] + next(lines)
        if whole.startswith(program):
            words = shlex.split(whole, comments=True)
            cut = next((at for at, word in enumerate(words) if word in ("|", ">", "&&", "&", ";")), len(words))
            yield words[:cut]


def settings_in(environment: dict[str, str]) -> None:
    """Raises where a variable looks like a setting of the daemon, and is none, or has a wrong value."""
    command = read((), {name: value for name, value in environment.items() if name != "DOWNCORE_CONFIG"})
    command.rows()


def settings_of(path: Path) -> Any:
    """The configuration that a file of settings gives."""
    return read(("--config", str(path)), {}).config()


def _parse(command: Any, name: str, arguments: list[str]) -> None:
    context = command.make_context(name, list(arguments))
    if hasattr(command, "commands") and context._protected_args + context.args:
        below, child, rest = command.resolve_command(context, context._protected_args + context.args)
        _parse(child, below, rest)
