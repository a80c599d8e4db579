"""downcore token new, hash: tokens, and the lines of the principals' file that know them by their hash alone."""

import base64
import hashlib
import json
import os
import re
import secrets
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from ops.cli.app import make_app, run_app
from ops.cli.errors import CliError, ExitCode

SCOPES = ("generate", "warm", "admin")
SECRET_BYTES = 32
SALT_BYTES = 16
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_TOKEN = re.compile(r"dct_([A-Za-z0-9_-]{1,64})\.([A-Za-z0-9_-]{43})")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

app = make_app("Tokens: make one, or hash one. The daemon's file of principals holds hashes and never a token.")
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Of the principal: letters, digits, - and _.")]


def run(arguments: list[str]) -> int:
    """The command."""
    return run_app(app, "token", arguments)


@app.command("new")
def new(
    name: NameArgument,
    scope: Annotated[list[str] | None, typer.Option("--scope", help="generate, warm or admin; may come again.")] = None,
    namespace: Annotated[str, typer.Option("--namespace", help="Default: the name.")] = "",
    expires: Annotated[str, typer.Option("--expires", metavar="TIME", help="As 12h, 90d, 8w. Default: never.")] = "",
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="A new file, for its owner alone.")] = None,
    principals: Annotated[
        Path | None, typer.Option("--principals", metavar="FILE", help="Append the principal to this file.")
    ] = None,
) -> None:
    """Make a token for a new principal. The token goes to standard output or --out, once; it is kept nowhere.

    The principal's table goes to standard error, or to the end of the file that --principals names. A second token of a
    principal that is there already is made without --principals, and its hash added to `tokens` by hand.
    """
    if not _NAME.fullmatch(name):
        raise CliError(ExitCode.USAGE, f"name {name!r} must match {_NAME.pattern}")
    if namespace and (not _NAMESPACE.fullmatch(namespace) or len(namespace) > 128):
        raise CliError(ExitCode.USAGE, f"namespace {namespace!r} must be names separated by slashes")
    unknown = sorted(set(scope or ()) - set(SCOPES))
    if unknown:
        raise CliError(ExitCode.USAGE, f"no scope {unknown[0]!r}: {', '.join(SCOPES)}")
    secret = base64.urlsafe_b64encode(secrets.token_bytes(SECRET_BYTES)).rstrip(b"=").decode()
    table = _table(name, scope or ["generate"], namespace, _hash_of(secret), _until(expires))
    token = f"dct_{name}.{secret}\n"
    if principals is not None and re.search(rf'^name = "{name}"$', _text_of(principals), re.MULTILINE):
        raise CliError(ExitCode.USAGE, f"{principals} has a principal {name} already")
    if out is not None:
        _write(out, token, os.O_EXCL)
    else:
        print(token, end="")
    if principals is not None:
        _write(principals, table, os.O_APPEND)
    else:
        print(table, end="", file=sys.stderr)


@app.command("hash")
def hash_token() -> None:
    """Read a token from standard input and print its hash, as `tokens` of the principals' file takes it."""
    found = _TOKEN.fullmatch(sys.stdin.read().strip())
    if found is None:
        raise CliError(ExitCode.USAGE, "standard input holds no token")
    print(_hash_of(found[2]))


def _hash_of(secret: str) -> str:
    """With a fresh salt. SHA-256 alone is enough: of 256 random bits there is nothing to guess."""
    salt = secrets.token_bytes(SALT_BYTES)
    return f"sha256:{salt.hex()}:{hashlib.sha256(salt + secret.encode()).hexdigest()}"


def _table(name: str, scopes: list[str], namespace: str, hash_text: str, until: datetime | None) -> str:
    expires = f", expires = {until.strftime('%Y-%m-%dT%H:%M:%SZ')}" if until is not None else ""
    lines = [
        "",
        "[[principals]]",
        f'name = "{name}"',
        f"scopes = {json.dumps(list(dict.fromkeys(scopes)))}",
        *([f'namespace = "{namespace}"'] if namespace else []),
        f'tokens = [{{ hash = "{hash_text}"{expires} }}]',
    ]
    return "\n".join(lines) + "\n"


def _until(text: str) -> datetime | None:
    """When a time from now is over."""
    if not text:
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,5})([mhdw])", text)
    if found is None:
        raise CliError(ExitCode.USAGE, f"--expires {text!r} is no time such as 12h, 90d or 8w")
    try:
        return datetime.now(UTC) + timedelta(**{_UNITS[found[2]]: int(found[1])})
    except OverflowError:
        raise CliError(ExitCode.USAGE, f"--expires {text!r} is after the year 9999") from None


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise CliError(ExitCode.USAGE, f"{path}: {error}") from None


def _write(path: Path, text: str, flag: int) -> None:
    """Into a file that is made for its owner alone where it is not there."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise CliError(ExitCode.USAGE, f"{path}: {error.strerror}") from None
