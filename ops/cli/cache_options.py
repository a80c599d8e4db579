"""What the commands about prefixes and tiers share: naming a prompt, a prefix and a tier."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from downcore.v1 import cache_pb2

from ops.cli.client import CACHE, Client
from ops.cli.errors import CliError, ExitCode
from ops.cli.prompt import make_chat, read_prompt

KEY_DIGITS = 64
SHORT_KEY_DIGITS = 12  # in tables; every command takes the beginning of a key
_HEX = frozenset("0123456789abcdef")


class TierChoice(StrEnum):
    """The tiers, fastest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    @property
    def wire_name(self) -> str:
        """As the protocol writes it."""
        return f"CACHE_TIER_{self.name}"


KeyArgument = Annotated[str | None, typer.Argument(metavar="KEY", help="A prefix's key, or its beginning.")]
FileOption = Annotated[Path | None, typer.Option("--prompt-file", help="The prompt, from a file; - reads stdin.")]
ChatOption = Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")]
SystemOption = Annotated[str | None, typer.Option("--system", help="System message before it, with --chat.")]


def tier_name(tier: cache_pb2.CacheTier) -> str:
    """ "disk" for CACHE_TIER_DISK."""
    known = cache_pb2.CacheTier.DESCRIPTOR.values_by_number.get(tier)
    return known.name.removeprefix("CACHE_TIER_").lower() if known is not None else str(tier)


def make_prompt(text: str, *, chat: bool, system: str | None) -> cache_pb2.Prompt:
    """The text as it is, or as the user's turn of a chat.

    Raises:
        CliError: a system message without a chat.
    """
    if chat:
        return cache_pb2.Prompt(chat=make_chat(text, system))
    if system is not None:
        raise CliError(ExitCode.USAGE, "--system needs --chat")
    return cache_pb2.Prompt(text=text)


def find_key(client: Client, beginning: str, timeout_s: float) -> str:
    """The whole key of the one prefix whose key begins so.

    Raises:
        CliError: it is not hexadecimal, or there are none or several.
    """
    digits = beginning.lower()
    if not digits or len(digits) > KEY_DIGITS or not _HEX.issuperset(digits):
        raise CliError(ExitCode.USAGE, f"{beginning!r} is not a key, nor the beginning of one")
    if len(digits) == KEY_DIGITS:
        return digits
    request = cache_pb2.ListPrefixesRequest(key_prefix=digits, page_size=2)
    found = client.unary(f"{CACHE}/ListPrefixes", request, cache_pb2.ListPrefixesResponse, timeout_s)
    if not found.prefixes:
        raise CliError(ExitCode.NOT_FOUND, f"no prefix {beginning!r}")
    if len(found.prefixes) > 1:
        keys = " and ".join(prefix.key[: len(digits) + 4] for prefix in found.prefixes)
        text = f"{found.total:,} prefixes begin with {beginning!r}, {keys} for instance: give more digits"
        raise CliError(ExitCode.USAGE, text)
    return found.prefixes[0].key


def file_prompt(prompt_file: Path | None, *, chat: bool, system: str | None) -> cache_pb2.Prompt | None:
    """The prompt of --prompt-file, where it is given.

    Raises:
        CliError: the file cannot be read, or something is said about a prompt that is not there.
    """
    if prompt_file is not None:
        return make_prompt(read_prompt(None, prompt_file), chat=chat, system=system)
    if chat or system is not None:
        raise CliError(ExitCode.USAGE, "--chat and --system need --prompt-file")
    return None


def make_selector(
    client: Client, key: str | None, prompt: cache_pb2.Prompt | None, timeout_s: float
) -> cache_pb2.PrefixSelector:
    """The prefix that a command is about: exactly one of a key's beginning and a prompt. Raises CliError otherwise."""
    if (key is None) == (prompt is None):
        raise CliError(ExitCode.USAGE, "give a key or --prompt-file, one of them")
    if key is not None:
        return cache_pb2.PrefixSelector(key=find_key(client, key, timeout_s))
    return cache_pb2.PrefixSelector(prompt=prompt)
