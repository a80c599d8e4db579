"""`python -m daemon.null [FLAGS] [--null-rate TOKENS]`: the real front before an engine that only sends tokens.

Flags are those of `python -m daemon`; the model's folder gives the tokenizer. It says that it serves the model "null".
"""

import os
import sys

import msgspec

from daemon.__main__ import run
from daemon.front.command_line import read
from daemon.front.settings import SettingsError

RATE_FLAG = "--null-rate"


def main() -> int:
    """Exit status: as the daemon's."""
    flags = sys.argv[1:]
    rate: list[str] = []
    if RATE_FLAG in flags:
        at = flags.index(RATE_FLAG)
        rate, flags[at : at + 2] = ["--rate", *flags[at + 1 : at + 2]], []
    try:
        config = read(flags, os.environ).config()
    except SettingsError as error:
        print(f"downcored: {error}", file=sys.stderr)
        return 2
    return run(msgspec.structs.replace(config, engine_command=(sys.executable, "-m", "daemon.null.engine", *rate)))


if __name__ == "__main__":
    sys.exit(main())
