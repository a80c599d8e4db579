"""Entry point of `downcore`: imports the module of the command that is asked for, and turns errors into exit codes.

Importing typer, rich and grpc for every command would cost more than most commands take. So this file, which runs
first, imports none of them; COMMANDS says which module has which command, and importlib loads the chosen one. This is
the only place of the project where a module is imported while the program runs.
"""

import difflib
import importlib
import os
import sys
from dataclasses import dataclass
from types import ModuleType

from ops.cli.errors import CliError, ExitCode


@dataclass(frozen=True, slots=True)
class Command:
    """A command: the module whose `run(arguments)` carries it out."""

    module: str
    summary: str


COMMANDS = {
    "serve": Command("ops.cli.serve", "Run the daemon in the foreground"),
    "status": Command("ops.cli.status", "What the daemon serves, and whether it does"),
    "generate": Command("ops.cli.generate", "Stream an answer to a prompt"),
    "tokenize": Command("ops.cli.tokenize", "Token ids of a text"),
    "prefix": Command("ops.cli.prefix", "Cached prefixes: ls, show, explain, warm, pin, unpin, evict, top"),
    "tiers": Command("ops.cli.tiers", "Tiers of the cache: ls, show, stat, watch, verify, flush"),
    "quota": Command("ops.cli.quota", "What a namespace may keep: ls, set, rm"),
    "session": Command("ops.cli.session", "Sequences being served: ls, show ID, abort ID"),
    "ledger": Command("ops.cli.ledger", "Every byte of every tier by owner and kind"),
    "top": Command("ops.cli.top", "Tiers, rates and sequences, live"),
    "events": Command("ops.cli.events", "What has happened to the daemon; -f: what happens"),
    "ping": Command("ops.cli.ping", "Health and round-trip time"),
    "drain": Command("ops.cli.drain", "Refuse new requests and wait for the open ones"),
    "token": Command("ops.cli.token", "Tokens for the daemon's callers: new, hash"),
    "config": Command("ops.cli.config", "Settings of the daemon: show, check"),
    "doctor": Command("ops.cli.doctor", "Is this machine fit, and what to change"),
    "model": Command("ops.cli.model", "Models: check, fetch, path"),
    "store": Command("ops.cli.store", "The disk tier's directory, offline: fsck, dump"),
    "demo": Command("ops.cli.demo", "Ask two questions about a real document"),
    "bench": Command("ops.cli.bench", "Measure: the served model, load, recorded requests, kernels"),
    "completion": Command("ops.cli.completion", "A completion script: bash, zsh, fish"),
    "version": Command("ops.cli.version", "Version of this program"),
}

# Flags of every command that calls a daemon, before its name or after it; each is a variable too.
CREDENTIALS = {
    "--token-file": "DOWNCORE_TOKEN_FILE",
    "--tls-ca": "DOWNCORE_TLS_CA",
    "--tls-cert": "DOWNCORE_TLS_CERT",
    "--tls-key": "DOWNCORE_TLS_KEY",
}

TAKE_DAEMON_FLAGS = ("serve", "config", "doctor")  # what follows one of these is not for the command line

USAGE = "usage: downcore [CREDENTIALS] COMMAND [OPTIONS]"
FOOTER = """\
Each command explains itself: downcore COMMAND --help
The daemon is found at --server, $DOWNCORE_SERVER, or its default Unix socket.
Credentials, where it wants any: --token-file, --tls-ca, --tls-cert, --tls-key FILE, or $DOWNCORE_TOKEN_FILE and so on.
Exit codes: 0 ok, 1 failed, 2 usage, 3 unreachable, 4 unauthorised, 5 degraded, 6 not found, 7 timeout."""


def main() -> None:
    """Runs the command line and exits with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Carries out one command line; returns the exit code."""
    try:
        code = _carry_out(arguments)
        sys.stdout.flush()
        return code
    except CliError as error:
        return _fail(error.code, str(error))
    except UnicodeEncodeError as error:
        if not any("\ud800" <= char <= "\udfff" for char in error.object):  # what the system makes of other bytes
            raise
        return _fail(ExitCode.USAGE, "the command line is not UTF-8")
    except BrokenPipeError:  # who reads has gone; at the exit Python would try to write the rest once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _carry_out(arguments: list[str]) -> int:
    arguments = take_credentials(arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text())
        return ExitCode.OK if arguments else ExitCode.USAGE
    name, rest = arguments[0], arguments[1:]
    name = "version" if name in ("-V", "--version") else name
    command = COMMANDS.get(name)
    if command is None:
        raise CliError(ExitCode.USAGE, _unknown(name))
    return load(name).run(rest)


def take_credentials(arguments: list[str]) -> list[str]:
    """Puts the credentials' flags into the environment, where ops/cli/credentials.py looks. Returns: the rest.

    What follows `--` is an argument whatever it looks like, and so is what follows a command that takes the
    daemon's flags.
    """
    rest: list[str] = []
    left = list(arguments)
    while left and left[0] != "--" and not (rest and rest[0] in TAKE_DAEMON_FLAGS):
        flag, equals, value = left.pop(0).partition("=")
        if flag not in CREDENTIALS:
            rest.append(flag + equals + value)
            continue
        if not equals and not left:
            raise CliError(ExitCode.USAGE, f"{flag} needs a file")
        os.environ[CREDENTIALS[flag]] = value if equals else left.pop(0)
    return rest + left


def load(name: str) -> ModuleType:
    """The module of a command."""
    return importlib.import_module(COMMANDS[name].module)


def help_text() -> str:
    """All commands, one a line."""
    lines = [f"  {name:<11} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join([USAGE, "", *lines, "", FOOTER])


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "downcore --help lists them"
    return f"no command {name!r}; {hint}"


def _fail(code: ExitCode, message: str) -> int:
    print(f"downcore: {message}", file=sys.stderr)
    return code
