"""What a check says: a name, how bad it is, what was found, and what to change."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"  # it runs, and less well than it could
    FAIL = "fail"  # it will not run, or not as it should


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's. `advice` is what to change, where it is not well."""

    name: str
    level: Level
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Finding:
    """Nothing to change."""
    return Finding(name, Level.OK, found)


def warn(name: str, found: str, advice: str) -> Finding:
    """It runs, and less well than it could."""
    return Finding(name, Level.WARN, found, advice)


def fail(name: str, found: str, advice: str) -> Finding:
    """It will not run, or not as it should."""
    return Finding(name, Level.FAIL, found, advice)
