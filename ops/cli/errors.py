"""How a command ends: the exit codes, and the one exception that carries them."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What a script learns from a command."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    UNAUTHORISED = 4
    DEGRADED = 5  # the daemon answers, but does not serve
    NOT_FOUND = 6
    TIMEOUT = 7
    INTERRUPTED = 130  # what a shell expects of a program that Ctrl-C ended


class CliError(Exception):
    """Ends the command with one line on stderr and an exit code."""

    def __init__(self, code: ExitCode, message: str) -> None:
        super().__init__(message)
        self.code = code
