"""What a replay leaves behind: a JSON file and tables."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ops.bench.clairvoyant import BELADY
from ops.bench.replay import CLAIRVOYANT, BudgetFigures, DecisionTimes, PolicyFigures, Replayed
from ops.bench.report import machine_name, slug, versions, write_record
from ops.cli.output import human_bytes, human_count, make_table


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """One run of the replay."""

    name: str
    traces: tuple[str, ...]  # file names
    replayed: Replayed
    decisions: DecisionTimes | None
    cpu_s: float  # of reading and replaying, all policies


def as_plain(report: ReplayReport) -> dict[str, Any]:
    """For -o json and the file."""
    return {"machine": machine_name(), "versions": versions(), **asdict(report)}


def write_json(report: ReplayReport, folder: Path) -> Path:
    """Writes replay-NAME-MACHINE-DATE.json; returns its path."""
    return write_record(f"replay-{slug(report.name)}", as_plain(report), folder)


def print_report(report: ReplayReport, console: Console) -> None:
    """All tables."""
    replayed = report.replayed
    console.print(
        f"[bold]{report.name}[/]: {replayed.num_requests:,} requests, {human_count(replayed.num_tokens)} tokens\n"
        f"working set {human_bytes(replayed.working_set_bytes)}; with checkpoints only where they are worth keeping "
        f"{human_bytes(replayed.admitted_bytes)}\n"
        f"unlimited: {replayed.unlimited_hit_rate:.1%} of tokens, {replayed.unlimited_saved_part:.1%} of FLOPs saved\n"
    )
    for budget in replayed.budgets:
        _print_budget(budget, console)
    times = report.decisions
    if times is not None:
        console.print(
            f"one decision among {times.num_items:,} items in {times.num_classes:,} classes: {times.pop_us_p50:.1f} us "
            f"median, {times.pop_us_p99:.1f} us p99 ({times.quiet_pop_us_p99:.1f} us undisturbed); other weights take "
            f"{times.reweigh_us:.0f} us"
        )
    console.print(f"replayed in {report.cpu_s:.1f} s of CPU")


def _print_budget(budget: BudgetFigures, console: Console) -> None:
    console.print(f"[bold]{budget.part:.0%}[/] of the working set, {human_bytes(budget.budget_bytes)}")
    numeric = ("tokens hit", "FLOPs saved", "x LRU", "of Belady", "of best of 7", "of unlimited", "evictions", "p99 us")
    table = make_table(("policy", *numeric), numeric=numeric)
    for name, figures in _rows(budget):
        p99 = figures.decision_us_p99
        table.add_row(
            name,
            f"{figures.token_hit_rate:.1%}",
            f"{figures.saved_flops_part:.1%}",
            f"{figures.vs_lru:.3f}",
            f"{figures.vs_belady:.1%}",
            f"{figures.vs_clairvoyant:.1%}",
            f"{figures.vs_unlimited:.1%}",
            f"{figures.num_evictions:,}",
            f"{p99:.0f}" if p99 is not None else "-",
        )
    console.print(table)
    for figures in budget.policies:
        for change in figures.changes:
            console.print(f"  {figures.policy}: {change}")
    console.print()


def _rows(budget: BudgetFigures) -> list[tuple[str, PolicyFigures]]:
    """All policies but the clairvoyants, of which the table has two: Belady's rule, and whichever rule saved most."""
    by_name = {figures.policy: figures for figures in budget.policies}
    online = [(name, figures) for name, figures in by_name.items() if not name.startswith(CLAIRVOYANT)]
    return [
        *online,
        ("clairvoyant, Belady", by_name[CLAIRVOYANT + BELADY.name]),
        (f"clairvoyant, best of seven: {budget.best_clairvoyant}", by_name[CLAIRVOYANT + budget.best_clairvoyant]),
    ]
