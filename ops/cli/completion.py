"""downcore completion bash, zsh, fish: a script that completes commands, options and their choices.

The script holds every word itself, so that completing starts no program. It is made from the commands as they are.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer
from typer.main import get_command

from ops.cli.app import HELP_NAMES, make_app, run_app
from ops.cli.main import COMMANDS, CREDENTIALS, load

PASS_ON = ("serve", "config show", "config check", "doctor")  # commands that take the daemon's flags

app = make_app()


class Shell(StrEnum):
    """Those there are scripts for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@dataclass(frozen=True, slots=True)
class Words:
    """What may follow a command: subcommands and options, and the choices of an option by its name."""

    path: str  # "tiers ls"; empty for the program itself
    words: tuple[str, ...]
    choices: dict[str, tuple[str, ...]]


def run(arguments: list[str]) -> int:
    """The command."""
    return run_app(app, "completion", arguments)


@app.command(context_settings=HELP_NAMES)
def completion(shell: Annotated[Shell, typer.Argument(help="bash, zsh or fish.")]) -> None:
    """Print a completion script. bash reads it from ~/.local/share/bash-completion/completions/downcore."""
    tree = list(all_words())
    script = {Shell.BASH: bash_script, Shell.ZSH: zsh_script, Shell.FISH: fish_script}[shell]
    print(script(tree), end="")


def all_words() -> Iterator[Words]:
    """Every command with what may follow it, the program itself first."""
    yield Words("", (*COMMANDS, *CREDENTIALS, "--help", "--version"), {})
    flags = tuple(daemon_flags())
    for name in COMMANDS:
        commands = getattr(load(name), "app", None)
        found = list(_below(name, get_command(commands))) if commands is not None else [Words(name, (), {})]
        for words in found:
            more = flags if words.path in PASS_ON else ()
            yield Words(words.path, (*words.words, *more), words.choices)


def daemon_flags() -> list[str]:
    """The daemon's own flags, which it alone knows."""
    command = [sys.executable, "-m", "daemon", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sorted(set(re.findall(r"^\s+(--[a-z0-9-]+)", shown, re.MULTILINE)))


def bash_script(tree: list[Words]) -> str:
    """A function that walks the words of the line down the tree."""
    lines = ["_downcore_words() {", '  case "$1" in']
    lines += [f"    {_quoted(words.path)}) echo {_quoted(' '.join(words.words))} ;;" for words in tree]
    lines += ["    *) return 1 ;;", "  esac", "}", "_downcore_choices() {", '  case "$1" in']
    for words in tree:
        for option, choices in words.choices.items():
            lines.append(f"    {_quoted(f'{words.path} {option}')}) echo {_quoted(' '.join(choices))} ;;")
    lines += ["    *) return 1 ;;", "  esac", "}"]
    return "\n".join(lines) + BASH_FUNCTION


def zsh_script(tree: list[Words]) -> str:
    """The same function, through zsh's own bridge."""
    return "#compdef downcore\nautoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n" + (
        bash_script(tree)
    )


def fish_script(tree: list[Words]) -> str:
    """A line for each word."""
    lines = ["complete -c downcore -f"]
    for words in tree:
        condition = _fish_condition(words.path)
        for word in words.words:
            choices = words.choices.get(word, ())
            what = (
                f"-l {word[2:]}"
                if word.startswith("--")
                else f"-s {word[1:]}"
                if word.startswith("-")
                else f"-a {word}"
            )
            given = f" -x -a {_quoted(' '.join(choices))}" if choices else " -F" if word.startswith("-") else ""
            lines.append(f"complete -c downcore {condition} {what}{given}")
    return "\n".join(lines) + "\n"


BASH_FUNCTION = """
_downcore() {
  local path="" word found i=1
  COMPREPLY=()
  while [ "$i" -lt "$COMP_CWORD" ]; do
    word="${COMP_WORDS[$i]}"
    if _downcore_words "${path:+$path }$word" > /dev/null; then path="${path:+$path }$word"; fi
    i=$((i + 1))
  done
  word="${COMP_WORDS[$COMP_CWORD]}"
  if found="$(_downcore_choices "$path ${COMP_WORDS[$((COMP_CWORD - 1))]}")"; then
    COMPREPLY=($(compgen -W "$found" -- "$word"))
  elif [ -z "$path" ] || [ "${word#-}" != "$word" ] || ! _downcore_is_leaf "$path"; then
    COMPREPLY=($(compgen -W "$(_downcore_words "$path")" -- "$word"))
  fi
}
_downcore_is_leaf() {
  case " $(_downcore_words "$1")" in *\\ [a-z]*) return 1 ;; *) return 0 ;; esac
}
complete -o default -F _downcore downcore
"""


def _below(path: str, command: Any) -> Iterator[Words]:
    """A command and its subcommands. Its class is typer's own, which has no public name."""
    options: list[str] = ["--help"]
    choices: dict[str, tuple[str, ...]] = {}
    for parameter in command.params:
        if parameter.param_type_name != "option":
            continue
        names = [*parameter.opts, *parameter.secondary_opts]
        options += names
        of_type = getattr(parameter.type, "choices", ())
        if of_type:
            choices |= {name: tuple(str(getattr(choice, "value", choice)) for choice in of_type) for name in names}
    below: dict[str, Any] = getattr(command, "commands", {})
    yield Words(path, (*below, *dict.fromkeys(options)), choices)
    for name, child in below.items():
        yield from _below(f"{path} {name}", child)


def _fish_condition(path: str) -> str:
    parts = path.split()
    if not parts:
        return "-n __fish_use_subcommand"
    return "-n " + _quoted("; and ".join(f"__fish_seen_subcommand_from {part}" for part in parts))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
