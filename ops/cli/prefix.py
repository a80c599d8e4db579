"""downcore prefix ls, show, explain, warm, pin, unpin, evict, top: what the cache keeps of prompts."""

import sys
import time
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

import typer
from downcore.v1 import cache_pb2
from rich.console import Group
from rich.live import Live

from ops.cli.app import Format, FormatOption, ServerOption, TimeoutOption, make_app, run_app
from ops.cli.cache_options import (
    ChatOption,
    FileOption,
    KeyArgument,
    SystemOption,
    file_prompt,
    find_key,
    make_prompt,
    make_selector,
)
from ops.cli.client import CACHE, Client, connect
from ops.cli.confirm import DryRunOption, YesOption, confirm
from ops.cli.errors import CliError, ExitCode
from ops.cli.output import Lines, as_dict, counted, make_console, make_facts, print_data
from ops.cli.prefix_view import (
    described_bytes,
    lookup_facts,
    lookup_table,
    prefix_facts,
    prefix_table,
    short_key,
)
from ops.cli.prefix_warm import warm
from ops.cli.prompt import read_prompt
from ops.cli.quantities import parse_seconds

PAGE_SIZE = 1000

app = make_app("Cached prefixes: beginnings of prompts that need not be computed again.")
app.command("warm")(warm)


class Order(StrEnum):
    """What a list begins with."""

    RECENCY = "recency"
    BYTES = "bytes"
    HITS = "hits"

    @property
    def wire_name(self) -> str:
        """As the protocol writes it."""
        return f"PREFIX_ORDER_{self.name}"


OrderOption = Annotated[Order, typer.Option("--order", help="Begin with the last used, the largest or the most used.")]


def run(arguments: list[str]) -> int:
    """The command."""
    return run_app(app, "prefix", arguments)


@app.command("ls")
def list_prefixes(
    key: Annotated[str, typer.Argument(metavar="[KEY]", help="Only keys that begin so.")] = "",
    order: OrderOption = Order.RECENCY,
    limit: Annotated[int, typer.Option("--limit", min=0, help="At most so many; 0: all.")] = 50,
    server: ServerOption = None,
    timeout: TimeoutOption = 10.0,
    output: FormatOption = Format.TABLE,
) -> None:
    """Cached prefixes. Blocks and bytes are those past the prefix that each continues, so they add up."""
    with connect(server) as client:
        found, total = _list(client, key.lower(), order, limit, timeout)
    if output is not Format.TABLE:
        print_data([as_dict(prefix) for prefix in found], output)
    elif found:
        make_console().print(prefix_table(found, time.time()))
    if output is Format.TABLE and len(found) < total:
        print(f"{len(found):,} of {total:,} prefixes; --limit 0 lists all", file=sys.stderr)
    elif output is Format.TABLE and not found:
        print("no prefixes", file=sys.stderr)


@app.command("show")
def show_prefix(
    key: Annotated[str, typer.Argument(metavar="KEY", help="A prefix's key, or its beginning.")],
    server: ServerOption = None,
    timeout: TimeoutOption = 10.0,
    output: FormatOption = Format.TABLE,
) -> None:
    """One prefix in full. Exits 6 when there is none."""
    with connect(server) as client:
        prefix = _fetch(client, find_key(client, key, timeout), timeout)
    _print_prefix(prefix, output)


@app.command("explain")
def explain(
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from stdin.")] = None,
    prompt_file: FileOption = None,
    chat: ChatOption = False,
    system: SystemOption = None,
    server: ServerOption = None,
    timeout: TimeoutOption = 30.0,
    output: FormatOption = Format.TABLE,
) -> None:
    """What a prompt would find in the cache now, from where it would be computed, and why not further."""
    question = make_prompt(read_prompt(prompt, prompt_file), chat=chat, system=system)
    request = cache_pb2.LookupPrefixRequest(prompt=question)
    with connect(server) as client:
        found = client.unary(f"{CACHE}/LookupPrefix", request, cache_pb2.LookupPrefixResponse, timeout)
    if output is not Format.TABLE:
        print_data(as_dict(found), output)
        return
    console = make_console()
    console.print(make_facts(lookup_facts(found)))
    if found.tiers:
        console.print()
        console.print(lookup_table(found.tiers))


@app.command("pin")
def pin_prefix(
    key: KeyArgument = None,
    prompt_file: FileOption = None,
    chat: ChatOption = False,
    system: SystemOption = None,
    ttl: Annotated[str | None, typer.Option("--ttl", metavar="TIME", help="Then the pin lapses: 90s, 1h, 7d.")] = None,
    server: ServerOption = None,
    timeout: TimeoutOption = 30.0,
    output: FormatOption = Format.TABLE,
) -> None:
    """Keep a prefix from eviction: by its key, or the deepest one of a prompt. Exits 6 when there is none."""
    ttl_s = parse_seconds(ttl, "--ttl") if ttl is not None else None
    prompt = file_prompt(prompt_file, chat=chat, system=system)
    with connect(server) as client:
        request = cache_pb2.PinPrefixRequest(prefix=make_selector(client, key, prompt, timeout), ttl_s=ttl_s)
        answer = client.unary(f"{CACHE}/PinPrefix", request, cache_pb2.PinPrefixResponse, timeout)
    _print_prefix(answer.prefix, output)


@app.command("unpin")
def unpin_prefix(
    key: KeyArgument = None,
    prompt_file: FileOption = None,
    chat: ChatOption = False,
    system: SystemOption = None,
    server: ServerOption = None,
    timeout: TimeoutOption = 30.0,
    output: FormatOption = Format.TABLE,
) -> None:
    """Take a pin back. Exits 6 when there is no such prefix."""
    prompt = file_prompt(prompt_file, chat=chat, system=system)
    with connect(server) as client:
        request = cache_pb2.UnpinPrefixRequest(prefix=make_selector(client, key, prompt, timeout))
        answer = client.unary(f"{CACHE}/UnpinPrefix", request, cache_pb2.UnpinPrefixResponse, timeout)
    _print_prefix(answer.prefix, output)


@app.command("evict")
def evict_prefix(
    key: Annotated[str, typer.Argument(metavar="KEY", help="A prefix's key, or its beginning.")],
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    server: ServerOption = None,
    timeout: TimeoutOption = 30.0,
    output: FormatOption = Format.TABLE,
) -> None:
    """Forget a prefix in every tier, and all that continue it. Asks first. Exits 6 when there is none."""
    with connect(server) as client:
        whole_key = find_key(client, key, timeout)
        if dry_run or not yes:
            what = _described(_fetch(client, whole_key, timeout))
            if dry_run:
                print(f"would evict {what} and all that continue it")
                return
            confirm(f"Evict {what} and all that continue it?", yes=False)
        request = cache_pb2.EvictPrefixRequest(prefix=cache_pb2.PrefixSelector(key=whole_key))
        gone = client.unary(f"{CACHE}/EvictPrefix", request, cache_pb2.EvictPrefixResponse, timeout)
    if output is not Format.TABLE:
        print_data(as_dict(gone), output)
        return
    parts = (
        counted(gone.prefixes, "prefix", "prefixes"),
        counted(gone.blocks, "block"),
        counted(gone.checkpoints, "checkpoint"),
    )
    kept = f"; {counted(gone.kept_blocks, 'block')} on its path stay, others need them" if gone.kept_blocks else ""
    print(f"evicted {', '.join(parts)}: {described_bytes(gone.bytes)}{kept}")


@app.command("top")
def top(
    order: OrderOption = Order.HITS,
    limit: Annotated[int, typer.Option("--limit", min=1, max=PAGE_SIZE, help="At most so many.")] = 20,
    interval: Annotated[float, typer.Option("--interval", "-w", min=0.1, metavar="SECONDS")] = 2.0,
    count: Annotated[int, typer.Option("--count", min=0, help="End after so many; 0: until interrupted.")] = 0,
    server: ServerOption = None,
    timeout: TimeoutOption = 10.0,
    output: FormatOption = Format.TABLE,
) -> None:
    """The first prefixes of an order, again and again; with -o json one line each time."""
    console = make_console()
    lines = Lines(output) if output is not Format.TABLE else None
    with connect(server) as client, Live(console=console, auto_refresh=False, transient=False) as live:
        for prefixes, total in _watch(client, order, limit, interval, count, timeout):
            if lines is not None:
                rows = [as_dict(prefix) for prefix in prefixes]
                lines.add_look("prefixes", rows, time_s=time.time(), total=total)
                continue
            now_s = time.time()
            shown = Group(
                f"{time.strftime('%H:%M:%S')}  {counted(total, 'prefix', 'prefixes')}", prefix_table(prefixes, now_s)
            )
            if console.is_terminal:
                live.update(shown, refresh=True)
            else:
                console.print(shown)


def _watch(
    client: Client, order: Order, limit: int, interval_s: float, count: int, timeout_s: float
) -> Iterator[tuple[list[cache_pb2.Prefix], int]]:
    number = 0
    while True:
        yield _list(client, "", order, limit, timeout_s)
        number += 1
        if number == count:
            return
        time.sleep(interval_s)


def _list(
    client: Client, key_prefix: str, order: Order, limit: int, timeout_s: float
) -> tuple[list[cache_pb2.Prefix], int]:
    """Prefixes in order, at most `limit` (0: all), and how many there are."""
    found: list[cache_pb2.Prefix] = []
    token = ""
    while True:
        size = min(limit - len(found), PAGE_SIZE) if limit else PAGE_SIZE
        request = cache_pb2.ListPrefixesRequest(
            page_size=size, page_token=token, key_prefix=key_prefix, order=order.wire_name
        )
        page = client.unary(f"{CACHE}/ListPrefixes", request, cache_pb2.ListPrefixesResponse, timeout_s)
        found += page.prefixes
        token = page.next_page_token
        if not token or (limit and len(found) >= limit):
            return found, page.total


def _fetch(client: Client, key: str, timeout_s: float) -> cache_pb2.Prefix:
    request = cache_pb2.ListPrefixesRequest(key_prefix=key, page_size=1)
    page = client.unary(f"{CACHE}/ListPrefixes", request, cache_pb2.ListPrefixesResponse, timeout_s)
    if not page.prefixes:
        raise CliError(ExitCode.NOT_FOUND, f"no prefix {key!r}")
    return page.prefixes[0]


def _print_prefix(prefix: cache_pb2.Prefix, output: Format) -> None:
    if output is not Format.TABLE:
        print_data(as_dict(prefix), output)
    else:
        make_console().print(make_facts(prefix_facts(prefix, time.time())))


def _described(prefix: cache_pb2.Prefix) -> str:
    return f"prefix {short_key(prefix.key)} of {prefix.tokens:,} tokens ({described_bytes(prefix.bytes)})"
