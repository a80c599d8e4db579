"""What a run of load comes to: percentiles, rates, errors by reason."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from ops.bench.load_run import LoadSettings, Run
from ops.bench.report import machine_name, slug, versions
from ops.cli.output import make_facts, make_table

PERCENTILES = (50, 90, 95, 99)
MAX_POINTS = 20_000  # of a distribution that is written down; a longer one is thinned evenly


@dataclass(frozen=True, slots=True)
class Distribution:
    """Seconds. Percentiles are by nearest rank: each is a value that was measured."""

    count: int
    mean_s: float
    p50_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One run, counted. Times run from when a request was due; rates are over the time of sending."""

    model: str
    target: str
    settings: LoadSettings
    seconds: float
    requests: int
    completed: int
    errors: dict[str, int]  # by reason
    late_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    answer_tokens_per_s: float
    cached_share: float  # of the prompt tokens of completed requests
    first_token: Distribution | None  # of completed requests, as the next two
    between_tokens: Distribution | None
    total: Distribution | None


def make_report(model: str, target: str, settings: LoadSettings, run: Run) -> LoadReport:
    """The figures. Requests that failed count among the errors alone."""
    done = [outcome for outcome in run.outcomes if outcome.error is None]
    seconds = max((max((o.ended_s for o in done), default=run.ended_s)) - run.began_s, 1e-9)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in done)
    return LoadReport(
        model=model,
        target=target,
        settings=settings,
        seconds=seconds,
        requests=len(run.outcomes),
        completed=len(done),
        errors=dict(Counter(outcome.error for outcome in run.outcomes if outcome.error is not None).most_common()),
        late_s=run.late_s,
        requests_per_s=len(done) / seconds,
        prompt_tokens_per_s=prompt_tokens / seconds,
        answer_tokens_per_s=sum(outcome.num_tokens for outcome in done) / seconds,
        cached_share=sum(outcome.cached_tokens for outcome in done) / prompt_tokens if prompt_tokens else 0.0,
        first_token=distribution([o.first_token_s for o in done if o.first_token_s is not None]),
        between_tokens=distribution([gap for outcome in done for gap in outcome.gaps_s()]),
        total=distribution([outcome.total_s for outcome in done]),
    )


def distribution(values: Sequence[float]) -> Distribution | None:
    """None where nothing was measured."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p90, p95, p99 = (ordered[math.ceil(len(ordered) * percent / 100) - 1] for percent in PERCENTILES)
    return Distribution(len(ordered), sum(ordered) / len(ordered), p50, p90, p95, p99, ordered[-1])


def as_plain(report: LoadReport) -> dict[str, Any]:
    """For JSON."""
    now = datetime.now(UTC)
    about = {"date": now.isoformat(timespec="seconds"), "machine": machine_name(), "versions": versions()}
    return {**about, **asdict(report)}


def write_json(report: LoadReport, run: Run, path: Path) -> None:
    """The figures, and each request behind them, for plots."""
    done = [outcome for outcome in run.outcomes if outcome.error is None]
    points = {
        "first_token_s": _thinned([o.first_token_s for o in done if o.first_token_s is not None]),
        "between_tokens_s": _thinned([gap for outcome in done for gap in outcome.gaps_s()]),
        "total_s": _thinned([outcome.total_s for outcome in done]),
        "ended_at_s": _thinned([outcome.ended_s - run.began_s for outcome in done]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**as_plain(report), "points": points}, indent=1) + "\n", encoding="utf-8")


def result_name(report: LoadReport) -> str:
    """The file's name without its ending."""
    settings = report.settings
    shape = f"closed-{settings.concurrency}" if settings.concurrency is not None else f"open-{settings.rate_per_s:g}"
    return f"load-{slug(report.model)}-{shape}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def print_report(report: LoadReport, console: Console) -> None:
    """Facts, a table of latencies, errors."""
    settings = report.settings
    shape = (
        f"closed, {settings.concurrency} at a time"
        if settings.concurrency is not None
        else f"open, {settings.rate_per_s:g} a second"
    )
    console.print(
        make_facts(
            [
                ("load", f"{shape}, {report.seconds:.1f} s, to {report.model} at {report.target}"),
                (
                    "requests",
                    f"{report.requests:,}, {report.completed:,} completed, {report.requests_per_s:,.1f} a second",
                ),
                (
                    "prompts",
                    f"{report.prompt_tokens_per_s:,.0f} tokens a second, {report.cached_share:.0%} from the cache",
                ),
                ("answers", f"{report.answer_tokens_per_s:,.0f} tokens a second"),
            ]
        )
    )
    names = ("count", "mean", "p50", "p90", "p95", "p99", "max")
    table = make_table(("milliseconds", *names), numeric=names)
    rows = (
        ("first token", report.first_token),
        ("between tokens", report.between_tokens),
        ("end to end", report.total),
    )
    for name, found in rows:
        if found is not None:
            values = (found.mean_s, found.p50_s, found.p90_s, found.p95_s, found.p99_s, found.max_s)
            table.add_row(name, f"{found.count:,}", *(f"{value * 1000:,.1f}" for value in values))
    console.print()
    console.print(table)
    for reason, count in report.errors.items():
        console.print(f"{count:,} ended with {reason}", markup=False)
    if settings.rate_per_s is not None and report.late_s > 0.05:
        console.print(f"requests were sent up to {report.late_s * 1000:,.0f} ms late: this machine was the limit")


def _thinned(values: Sequence[float]) -> list[float]:
    step = max(1, math.ceil(len(values) / MAX_POINTS))
    return [round(value, 6) for value in values[::step]]
