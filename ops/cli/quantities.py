"""Times and sizes as people type them."""

import re

from ops.cli.errors import CliError, ExitCode

MAX_UINT32 = (1 << 32) - 1  # what the protocol's counts and token ids can say
MAX_BYTES = 1 << 62  # and its sizes
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_BYTES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}  # powers of 1,024
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgtp]?)(?:i?b)?", re.IGNORECASE)


def parse_seconds(text: str, option: str) -> float:
    """ "90", "90s", "1.5h" and "7d" in seconds; raises CliError, naming the option, for anything else."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise CliError(ExitCode.USAGE, f"{option} {text!r} is no time: 90s, 15m, 1.5h and 7d are")
    return float(match[1]) * _SECONDS[match[2]]


def parse_bytes(text: str, option: str) -> int:
    """ "4096", "512MiB", "1.5g" in bytes; raises CliError, naming the option, for anything else."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise CliError(ExitCode.USAGE, f"{option} {text!r} is no size: 4096, 512MiB and 1.5g are")
    size = float(match[1]) * 1024 ** _BYTES[match[2].lower()]
    if size > MAX_BYTES:
        raise CliError(ExitCode.USAGE, f"{option} {text!r} is larger than any disk")
    return int(size)
