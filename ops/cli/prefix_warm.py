"""downcore prefix warm: prompts' prefixes are computed ahead of their use."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from downcore.v1 import cache_pb2

from ops.cli.app import Format, FormatOption, ServerOption
from ops.cli.cache_options import ChatOption, SystemOption, TierChoice, make_prompt
from ops.cli.client import CACHE, connect
from ops.cli.errors import CliError, ExitCode
from ops.cli.output import as_dict, make_console, print_data
from ops.cli.prefix_view import receipt_table
from ops.cli.progress import Bars, bars
from ops.cli.prompt import read_prompt
from ops.cli.quantities import parse_seconds

METHOD = f"{CACHE}/WarmPrefix"


def warm(
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from stdin.")] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option("--prompt-file", help="A prompt from a file; may be repeated.")
    ] = None,
    chat: ChatOption = False,
    system: SystemOption = None,
    tier: Annotated[TierChoice | None, typer.Option("--tier", help="Where it shall be. Default: the device.")] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Keep it from eviction.")] = False,
    ttl: Annotated[
        str | None,
        typer.Option("--ttl", metavar="TIME", help="Then the pin lapses, or without one it is forgotten: 90s, 1h, 7d."),
    ] = None,
    durable: Annotated[
        bool, typer.Option("--durable", help="End only when it is written and synced; tier disk.")
    ] = False,
    key: Annotated[
        str, typer.Option("--key", help="Your own name for the job: the same command joins it or has its receipt.")
    ] = "",
    detach: Annotated[bool, typer.Option("--detach", help="Let it go on when this command ends; needs --key.")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="With --detach: end once it has begun.")] = False,
    server: ServerOption = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Longest wait.")
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Compute prompts' prefixes and keep them in a tier. Ctrl-C cancels it, unless --detach. Prints the receipt."""
    if no_wait and not detach:
        raise CliError(ExitCode.USAGE, "--no-wait needs --detach")
    if durable and tier is None:
        tier = TierChoice.DISK
    names, texts = _read(prompt, prompt_file or [])
    request = cache_pb2.WarmPrefixRequest(
        key=key,
        prompts=[make_prompt(text, chat=chat, system=system) for text in texts],
        tier=tier.wire_name if tier is not None else None,
        ttl_s=parse_seconds(ttl, "--ttl") if ttl is not None else None,
        pin=pin,
        durable=durable,
        detached=detach,
    )
    with connect(server) as client:
        events = client.stream(METHOD, request, cache_pb2.WarmPrefixResponse, timeout)
        try:
            receipt = _follow(events, wait=not no_wait)
        except KeyboardInterrupt:
            if detach:
                print("the job goes on; the same command joins it", file=sys.stderr)
            raise
    if receipt is None:
        print(f"begun: {key}", file=sys.stderr)
    elif output is not Format.TABLE:
        print_data(as_dict(receipt), output, rows="prefixes")
    else:
        make_console().print(receipt_table(receipt, names))
        if receipt.is_repeated:
            make_console(stderr=True).print("this job had been done before; the receipt is of then")


def _read(prompt: str | None, prompt_files: list[Path]) -> tuple[list[str], list[str]]:
    """Names and texts of the prompts."""
    if prompt is not None and prompt_files:
        raise CliError(ExitCode.USAGE, "give a prompt or --prompt-file, one of them")
    if prompt_files:
        return [path.name for path in prompt_files], [read_prompt(None, path) for path in prompt_files]
    return ["prompt"], [read_prompt(prompt, None)]


def _follow(events: Iterator[cache_pb2.WarmPrefixResponse], *, wait: bool) -> cache_pb2.WarmReceipt | None:
    """Shows how far it is, until the receipt; None where nobody waits for it."""
    parts: list[_Part] = []
    with bars() as shown:
        for event in events:
            kind = event.WhichOneof("event")
            if kind == "receipt":
                return event.receipt
            if kind == "started":
                if not wait:
                    return None
                parts = [_Part(num_tokens) for num_tokens in event.started.prompt_tokens]
            elif kind == "progress" and event.progress.prompt_index < len(parts):
                parts[event.progress.prompt_index].take(event.progress)
            _show(shown, parts)
    raise CliError(ExitCode.FAILED, "the daemon ended the call without a receipt")


class _Part:
    """How far one prompt is."""

    def __init__(self, num_tokens: int) -> None:
        self.total = num_tokens  # of its prefix, once the daemon has said it
        self.computed = 0
        self.written = 0
        self.is_done = False

    def take(self, progress: cache_pb2.WarmProgress) -> None:
        self.total = progress.total_tokens
        if progress.stage == cache_pb2.WARM_STAGE_COMPUTING:
            self.computed = progress.done_tokens
        elif progress.stage == cache_pb2.WARM_STAGE_WRITING:
            self.computed, self.written = self.total, progress.done_tokens
        elif progress.stage == cache_pb2.WARM_STAGE_DONE:
            self.computed = self.written = self.total
            self.is_done = True


def _show(shown: Bars, parts: list[_Part]) -> None:
    total = sum(part.total for part in parts)
    computed, written = sum(part.computed for part in parts), sum(part.written for part in parts)
    num_done = sum(part.is_done for part in parts)
    shown.show("computing", computed, total, f"{computed:,}/{total:,} tokens, {num_done}/{len(parts)} prompts")
    if written:
        shown.show("writing", written, total, f"{written:,}/{total:,} tokens")
