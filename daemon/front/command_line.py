"""The daemon's command line, and the layers of settings beneath it: what `python -m daemon` is told, and by whom.

Every field of FrontConfig and of EngineConfig is a flag, a key of the file and a variable of its own name, so a new
setting is one line in its struct.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from daemon.config import EngineConfig
from daemon.front.config import FrontConfig, default_listen
from daemon.front.settings import Given, Layer, Section, SettingsError, closest, from_environment, from_file, merged

CONFIG_VARIABLE = "DOWNCORE_CONFIG"
MODEL_FLAG = "--model"  # the flag of model_path
NO_MODEL = "no model is named: --model PATH, or model_path in [engine]"
EPILOG = f"""\
Bytes may have a unit, --disk-bytes 64GiB. --gateway alone is --gateway true, and so is every flag of true or false.
Every flag is also a key of the TOML file that --config or ${CONFIG_VARIABLE} names, `grid = 128` below [engine], and a
variable, DOWNCORE_ENGINE__GRID. Flags win over variables, variables over the file: downcore config show --origin."""
USAGE = """\
downcore serve [--model PATH] [FLAG VALUE]...
       downcored --model PATH [FLAG VALUE]..."""
DESCRIPTION = """\
Serves a language model over gRPC, in the foreground. `downcore serve` without a model takes the one that
`downcore model fetch` gets; where none is named downcored ends."""
METAVARS = {
    "bytes_per_s": "BYTES", "tokens_per_s": "TOKENS", "_bytes": "BYTES", "_s": "SECONDS", "_ms": "MS", "_path": "PATH",
    "_file": "FILE", "listen": "PATH", "tcp": "HOST:PORT",
}  # fmt: skip
SECTIONS = {"front": Section(FrontConfig, hidden=("engine", "engine_command")), "engine": Section(EngineConfig)}


class Action(Enum):
    """What the daemon is to do with its settings."""

    SERVE = "serve"
    SHOW = "show"
    CHECK = "check"


@dataclass(frozen=True, slots=True)
class Command:
    """A parsed command line: all layers that were given, as one."""

    action: Action
    given: Layer

    def config(self) -> FrontConfig:
        """The configuration.

        Raises:
            SettingsError: a value is wrong, or there is no model.
        """
        engine = self.given.get("engine", {})
        if "model_path" not in engine:
            raise SettingsError(NO_MODEL)
        return self._made(engine)

    def check(self) -> list[str]:
        """What is wrong with the settings and with the files that they name; nothing where they are in order."""
        try:
            config = self.config()
        except SettingsError as error:
            return [str(error)]
        problems = [
            f"{name} {one.value!r}: no such readable file ({one.origin})"
            for given in self.given.values()
            for name, one in given.items()
            if name.endswith("_file") and one.value and not os.access(str(one.value), os.R_OK)
        ]
        if not Path(config.engine.model_path, "config.json").is_file():
            origin = self.given["engine"]["model_path"].origin
            problems.append(f"model_path {config.engine.model_path!r}: no folder with a config.json ({origin})")
        return problems

    def rows(self) -> list[dict[str, Any]]:
        """Every setting: section, key, flag, value, origin, default and help, as plain values.

        Raises:
            SettingsError: a value is wrong; whether there is a model is not asked.
        """
        self._made({"model_path": Given("", "default", is_text=False), **self.given.get("engine", {})})
        rows: list[dict[str, Any]] = []
        for section, known in SECTIONS.items():
            given = self.given.get(section, {})
            values = known.convert(given)
            for name, info in known.fields.items():
                default = None if info.default is msgspec.NODEFAULT else info.default
                default = default_listen() if name == "listen" else default
                rows.append(
                    {
                        "section": section,
                        "key": name,
                        "flag": flag_of(name),
                        "value": values.get(name, default),
                        "origin": given[name].origin if name in given else "default",
                        "default": default,
                        "help": known.help[name],
                    }
                )
        return rows

    def _made(self, engine: dict[str, Given]) -> FrontConfig:
        front = {"listen": Given(default_listen(), "default", is_text=False), **self.given.get("front", {})}
        return SECTIONS["front"].make(front, engine=SECTIONS["engine"].make(engine))


def read(args: Sequence[str], environ: Mapping[str, str]) -> Command:
    """The command line with the layers beneath it. Help ends the process, as argparse has it.

    Raises:
        SettingsError: a flag, variable or key is unknown, or the file cannot be read.
    """
    parser = _make_parser()
    found, extra = parser.parse_known_args(args)
    if extra:
        flag = extra[0].split("=", 1)[0]
        if not flag.startswith("-"):
            raise SettingsError(f"{flag!r} is no flag; the model's folder is named by {MODEL_FLAG}")
        close = closest(flag, [option for option in parser.known_flags if option.startswith("--")])
        raise SettingsError(f"no flag {flag}" + (f"; did you mean {close}?" if close else "; --help lists them"))
    flags = {name: value for name, value in vars(found).items() if value is not None}
    path = flags.pop("config", None) or environ.get(CONFIG_VARIABLE)
    action = Action(flags.pop("action", Action.SERVE))
    on_line: Layer = {
        section: {name: Given(flags[name], flag_of(name), is_text=True) for name in known.fields if name in flags}
        for section, known in SECTIONS.items()
    }
    layers = [from_file(Path(path), SECTIONS)] if path else []
    return Command(action, merged(*layers, from_environment(environ, SECTIONS), on_line))


def parse_args(args: Sequence[str] | None = None) -> FrontConfig:
    """The configuration that a command line says. Exits with status 2 and a message where it is wrong."""
    try:
        return read(sys.argv[1:] if args is None else args, os.environ).config()
    except SettingsError as error:
        print(f"downcored: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def flag_of(name: str) -> str:
    """`--max-queue` for max_queue."""
    return MODEL_FLAG if name == "model_path" else "--" + name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    """Raises SettingsError where argparse would print its usage of a hundred flags and exit."""

    @property
    def known_flags(self) -> list[str]:
        return list(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def _make_parser() -> _Parser:
    parser = _Parser(
        prog="downcored",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help=f"settings in TOML (default: ${CONFIG_VARIABLE})")
    for action, text in (
        (Action.SHOW, "print every setting with its origin as JSON, and end"),
        (Action.CHECK, "say whether the settings are in order, and end"),
    ):
        parser.add_argument(
            f"--{action.value}-config", dest="action", action="store_const", const=action.value, help=text
        )
    for section, known in SECTIONS.items():
        group = parser.add_argument_group(section)
        for name, info in known.fields.items():
            text = f"{known.help[name]}{_default(info.default)}".replace("%", "%%")
            if isinstance(info.default, bool):
                group.add_argument(flag_of(name), dest=name, nargs="?", const="true", metavar="true|false", help=text)
            else:
                group.add_argument(flag_of(name), dest=name, metavar=_metavar(name), help=text)
    return parser


def _default(value: Any) -> str:
    if value in ("", None, msgspec.NODEFAULT):
        return ""
    return f" (default {str(value).lower() if isinstance(value, bool) else value})"


def _metavar(name: str) -> str:
    """By the unit, which stands last in a name."""
    for ending, metavar in METAVARS.items():
        if name.endswith(ending):
            return metavar
    return "VALUE"
