"""Settings in layers: defaults, a TOML file, the environment, the command line. Each value knows where it came from.

The structs of daemon/config.py and daemon/front/config.py say which settings there are and what they may be; this file
says who set them. A section is one struct: `[engine]` of the file, `DOWNCORE_ENGINE__X` of the environment. A name that
no struct has is an error, wherever it stands, so that a misspelt setting is never a default in silence.

What is counted in bytes may be given with a unit, `64GiB`.

No setting holds a secret: what is secret lies in a file of its own, whose path is a setting that ends in `_file`.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

PREFIX = "DOWNCORE_"
MAX_FILE_BYTES = 1 << 20
_TABLE = re.compile(r"\s*\[\s*([\w-]+)\s*\]")
_KEY = re.compile(r"""\s*["']?([\w-]+)["']?\s*=""")
_IN_BYTES = re.compile(r"_bytes(_per_s)?$")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmgtp])(?:i?b)?", re.IGNORECASE)
_POWERS = "kmgtp"  # of 1,024, from the first on


class SettingsError(ValueError):
    """A setting is unknown or wrong; the message names it and where it was set."""


@dataclass(frozen=True, slots=True)
class Given:
    """A value as somebody gave it: `is_text` where all that could be given was text, as in the environment."""

    value: Any
    origin: str
    is_text: bool


Layer = dict[str, dict[str, Given]]  # by section and key


class Section:
    """The settings of one struct that may be given, by name."""

    def __init__(self, struct: type[msgspec.Struct], hidden: Iterable[str] = ()) -> None:
        self.struct = struct
        properties = msgspec.json.schema(struct)["$defs"][struct.__name__]["properties"]
        self.fields = {info.name: info for info in msgspec.structs.fields(struct) if info.name not in set(hidden)}
        self.help = {name: str(properties[name].get("description", "")) for name in self.fields}

    def convert(self, given: Mapping[str, Given]) -> dict[str, Any]:
        """The values in the types of their fields.

        Raises:
            SettingsError: a value is not of its field's type.
        """
        values: dict[str, Any] = {}
        for name, one in given.items():
            field_type, value = self.fields[name].type, one.value
            if _IN_BYTES.search(name):
                value = _in_bytes(value)
            if one.is_text and _is_array(field_type):
                value = [part.strip() for part in value.split(",") if part.strip()]
            try:
                values[name] = msgspec.convert(value, field_type, strict=not one.is_text)
            except ValueError as error:  # msgspec.ValidationError is one
                what = _wanted(name, field_type) or str(error)
                raise SettingsError(f"{name} {one.value!r}: {what} ({one.origin})") from None
        return values

    def make(self, given: Mapping[str, Given], **more: Any) -> Any:
        """The struct, with `more` for fields that are never given.

        Raises:
            SettingsError: a value is not of its field's type, or out of its bounds.
        """
        try:
            return self.struct(**more, **self.convert(given))
        except SettingsError:
            raise
        except ValueError as error:
            named = set(re.findall(r"\w+", str(error)))
            told = [f"{name}: {one.origin}" for name, one in given.items() if name in named]
            raise SettingsError(f"{error} ({', '.join(told)})" if told else str(error)) from None


Sections = Mapping[str, Section]


def from_file(path: Path, sections: Sections) -> Layer:
    """What a TOML file gives; origins are `file:line`.

    Raises:
        SettingsError: it cannot be read, is not TOML, or has a table or key that is no section or setting.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise SettingsError(f"{path}: more than {MAX_FILE_BYTES} bytes")
    try:
        text = content.decode()
        tables = tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from None
    lines = _lines(text)
    layer: Layer = {}
    for section, table in tables.items():
        where = f"{path}:{lines.get((section, ''), lines.get(('', section), 1))}"
        if not isinstance(table, dict):
            raise SettingsError(f"{section!r} stands outside of {_tables(sections)} ({where})")
        if section not in sections:
            raise SettingsError(f"no table {section!r}{_hint(section, sections)} ({where})")
        layer[section] = {}
        for key, value in cast("dict[str, Any]", table).items():
            origin = f"{path}:{lines.get((section, key), 1)}"
            if key not in sections[section].fields:
                raise SettingsError(_unknown(f"[{section}] {key}", key, section, sections, origin))
            layer[section][key] = Given(value, origin, is_text=False)
    return layer


def from_environment(environ: Mapping[str, str], sections: Sections) -> Layer:
    """What variables `DOWNCORE_SECTION__KEY` give; origins are their names.

    Raises:
        SettingsError: a variable looks like a setting, and is none.
    """
    layer: Layer = {}
    starts = tuple(f"{PREFIX}{section.upper()}_" for section in sections)
    for variable, text in environ.items():
        if not variable.startswith(starts) and not (variable.startswith(PREFIX) and "__" in variable):
            continue
        section, _, key = variable.removeprefix(PREFIX).partition("__")
        section, key = section.lower(), key.lower()
        if section not in sections or key not in sections[section].fields:
            known = [f"{PREFIX}{name.upper()}__{key.upper()}" for name in sections for key in sections[name].fields]
            raise SettingsError(f"no setting {variable}{_hint(variable, known)} (the environment)")
        layer.setdefault(section, {})[key] = Given(text, variable, is_text=True)
    return layer


def merged(*layers: Layer) -> Layer:
    """All layers as one: the later ones win."""
    result: Layer = {}
    for layer in layers:
        for section, given in layer.items():
            result.setdefault(section, {}).update(given)
    return result


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was most likely meant, if any."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)), None)


def _unknown(shown: str, key: str, section: str, sections: Sections, origin: str) -> str:
    """A key that its section lacks: another section may have it."""
    for other, candidate in sections.items():
        if other != section and key in candidate.fields:
            return f"no setting {shown}; it belongs to [{other}] ({origin})"
    return f"no setting {shown}{_hint(key, sections[section].fields)} ({origin})"


def _hint(name: str, known: Iterable[str]) -> str:
    close = closest(name, known)
    return f"; did you mean {close}?" if close is not None else ""


def _tables(sections: Sections) -> str:
    return " and ".join(f"[{name}]" for name in sections)


def _lines(text: str) -> dict[tuple[str, str], int]:
    """The line of each table, with an empty key, and of each key in it: the first that looks so, for messages."""
    found: dict[tuple[str, str], int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if table := _TABLE.match(line):
            section = table[1]
            found.setdefault((section, ""), number)
        elif key := _KEY.match(line):
            found.setdefault((section, key[1]), number)
    return found


def _in_bytes(value: Any) -> Any:
    """ "512MiB" and "1.5g" in bytes; anything else as it is, for its field to judge."""
    size = _SIZE.fullmatch(value) if isinstance(value, str) else None
    return int(float(size[1]) * 1024 ** (1 + _POWERS.index(size[2].lower()))) if size is not None else value


def _wanted(name: str, field_type: Any) -> str | None:
    """What a field takes, in an operator's words; None where the error's own say it."""
    for kind in _kinds(field_type):
        match kind:
            case msgspec.inspect.BoolType():
                return "must be true or false"
            case msgspec.inspect.IntType():
                return "must be a size: 4096, 512MiB, 1.5g" if _IN_BYTES.search(name) else "must be a whole number"
            case msgspec.inspect.FloatType():
                return "must be a number"
            case msgspec.inspect.StrType():
                return "must be a text"
            case _:
                pass
    return None


def _is_array(field_type: Any) -> bool:
    arrays = (msgspec.inspect.ListType, msgspec.inspect.VarTupleType, msgspec.inspect.TupleType)
    return any(isinstance(kind, arrays) for kind in _kinds(field_type))


def _kinds(field_type: Any) -> tuple[msgspec.inspect.Type, ...]:
    """The types that a field may have."""
    info = msgspec.inspect.type_info(field_type)
    info = info.type if isinstance(info, msgspec.inspect.Metadata) else info
    return info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
