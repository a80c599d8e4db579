"""downcore top: the daemon at a glance, again and again: health, rates, tiers, sequences."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from downcore.v1 import admin_pb2
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from ops.cli.app import HELP_NAMES, Format, FormatOption, ServerOption, TimeoutOption, make_app, run_app
from ops.cli.client import ADMIN, Client, connect
from ops.cli.errors import CliError, ExitCode
from ops.cli.output import Lines, as_dict, brief_seconds, human_bytes, make_console
from ops.cli.sequences_view import sequence_table
from ops.cli.status import state_name
from ops.cli.tiers_view import TierRates, stat_header, stat_line, tier_rates

HEADER_EVERY = 20  # rows, where there is no terminal to draw on
PLAIN = "{:<8} {:<8} {:>7} {:>7} {:>9} {:>9} {:>9} {:>10} {:>10} {:>10}"
PLAIN_NAMES = ("time", "state", "running", "waiting", "prompt/s", "answer/s", "steps/s", "device", "host", "disk")

app = make_app()


@dataclass(frozen=True, slots=True)
class Look:
    """What the daemon said at one time."""

    time_s: float
    info: admin_pb2.GetServerInfoResponse
    tiers: tuple[admin_pb2.Tier, ...]
    sequences: tuple[admin_pb2.Sequence, ...]


@dataclass(frozen=True, slots=True)
class Rates:
    """What it did between two looks, each second."""

    state: str
    running: int
    waiting: int
    steps_per_s: float
    prompt_tokens_per_s: float  # a prompt counts when its first token is drawn
    cached_tokens_per_s: float  # of these, what came from the cache
    answer_tokens_per_s: float
    tiers: tuple[TierRates, ...]


def run(arguments: list[str]) -> int:
    """The command."""
    return run_app(app, "top", arguments)


@app.command(context_settings=HELP_NAMES)
def top(
    interval: Annotated[float, typer.Option("--interval", "-w", min=0.1, metavar="SECONDS")] = 1.0,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="End after so many; 0: until interrupted.")] = 0,
    server: ServerOption = None,
    timeout: TimeoutOption = 5.0,
    output: FormatOption = Format.TABLE,
) -> None:
    """Tiers, rates and sequences, live. Off a terminal a row each time; with -o json a line each time."""
    console = make_console()
    lines = Lines(output) if output is not Format.TABLE else None
    is_drawn = lines is None and console.is_terminal
    with connect(server) as client, Live(console=console, auto_refresh=False, screen=False) as live:
        for number, (before, after) in enumerate(_pairs(client, interval, count, timeout)):
            rates = rates_between(before, after)
            if lines is not None:
                lines.add(_row(after, rates))
            elif is_drawn:
                live.update(screen(after, rates, console.size.height), refresh=True)
            else:
                if number % HEADER_EVERY == 0:
                    print(PLAIN.format(*PLAIN_NAMES), flush=True)
                print(_plain(after, rates), flush=True)


def rates_between(before: Look, after: Look) -> Rates:
    """Counters that went back began anew, with a new engine or a new daemon."""
    seconds = max(after.time_s - before.time_s, 1e-3)
    known = {tier.name: tier for tier in before.tiers}
    waiting = sum(sequence.state == admin_pb2.SEQUENCE_STATE_QUEUED for sequence in after.sequences)

    def grown(name: str) -> float:
        old, new = getattr(before.info, name), getattr(after.info, name)
        return (new - old if new >= old else new) / seconds

    return Rates(
        state=state_name(after.info),
        running=len(after.sequences) - waiting,
        waiting=waiting,
        steps_per_s=grown("steps"),
        prompt_tokens_per_s=grown("prompt_tokens"),
        cached_tokens_per_s=grown("cached_tokens"),
        answer_tokens_per_s=grown("answer_tokens"),
        tiers=tuple(tier_rates(known.get(t.name, admin_pb2.Tier()), t, seconds) for t in after.tiers),
    )


def screen(look: Look, rates: Rates, height: int) -> RenderableType:
    """One screen: a line of state, a line a tier, and as many sequences as fit."""
    info = look.info
    head = (
        f"{time.strftime('%H:%M:%S', time.localtime(look.time_s))}  {info.model or 'downcore'}  {rates.state}"
        f"  up {brief_seconds(info.uptime_s)}  engine start {info.engine_starts}"
    )
    flow = (
        f"{rates.running} running, {rates.waiting} waiting   prompts {rates.prompt_tokens_per_s:,.0f} tok/s"
        f" ({rates.cached_tokens_per_s:,.0f} cached)"
        f"   answers {rates.answer_tokens_per_s:,.1f} tok/s   {rates.steps_per_s:,.1f} steps/s"
    )
    use = [f"{t.name} {_share(t)} of {human_bytes(t.capacity_bytes)}" for t in look.tiers]
    texts = [head, flow, "   ".join(use), "", stat_header(), *map(stat_line, rates.tiers)]
    parts: list[RenderableType] = [Text(text, no_wrap=True, overflow="ellipsis") for text in texts]
    room = max(1, height - len(parts) - 5)
    shown = sorted(look.sequences, key=lambda s: -s.held_bytes)[:room]
    if shown:
        parts += ["", sequence_table(shown)]
    if len(look.sequences) > len(shown):
        parts.append(f"and {len(look.sequences) - len(shown)} more: downcore session ls")
    return Group(*parts)


def _pairs(client: Client, interval_s: float, count: int, timeout_s: float) -> Iterator[tuple[Look, Look]]:
    """Each look with the one before it, `count` times; 0: without end."""
    before = _look(client, timeout_s)
    number = 0
    while True:
        time.sleep(interval_s)
        after = _look(client, timeout_s)
        yield before, after
        before = after
        number += 1
        if number == count:
            return


def _look(client: Client, timeout_s: float) -> Look:
    """A daemon without an engine has no tables to show, and that is shown."""
    info = client.unary(
        f"{ADMIN}/GetServerInfo", admin_pb2.GetServerInfoRequest(), admin_pb2.GetServerInfoResponse, timeout_s
    )
    try:
        tiers = client.unary(f"{ADMIN}/ListTiers", admin_pb2.ListTiersRequest(), admin_pb2.ListTiersResponse, timeout_s)
        listed = client.unary(
            f"{ADMIN}/ListSequences", admin_pb2.ListSequencesRequest(), admin_pb2.ListSequencesResponse, timeout_s
        )
    except CliError as error:
        if error.code is not ExitCode.DEGRADED:
            raise
        return Look(time.time(), info, (), ())
    return Look(time.time(), info, tuple(tiers.tiers), tuple(listed.sequences))


def _row(look: Look, rates: Rates) -> dict[str, Any]:
    row = asdict(rates)
    by_tier = {tier["name"]: tier for tier in row.pop("tiers")}
    return {
        "time_s": look.time_s,
        **row,
        "tiers": by_tier,
        "sequences": [as_dict(sequence) for sequence in look.sequences],
    }


def _plain(look: Look, rates: Rates) -> str:
    use = {tier.name: _share(tier) for tier in look.tiers}
    return PLAIN.format(
        time.strftime("%H:%M:%S", time.localtime(look.time_s)),
        rates.state[:8],
        rates.running,
        rates.waiting,
        f"{rates.prompt_tokens_per_s:,.0f}",
        f"{rates.answer_tokens_per_s:,.1f}",
        f"{rates.steps_per_s:,.1f}",
        *(use.get(name, "-") for name in ("device", "host", "disk")),
    ).rstrip()


def _share(tier: admin_pb2.Tier) -> str:
    """How much of a tier is taken."""
    return f"{1 - tier.free_bytes / tier.capacity_bytes:.0%}" if tier.capacity_bytes else "-"
