"""What a run of the long context leaves behind: a JSON file and a table."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from ops.bench.longctx import BudgetFigures, LongReport
from ops.bench.report import machine_name, versions, write_record
from ops.cli.output import human_bytes, make_table


def as_plain(report: LongReport) -> dict[str, Any]:
    """For -o json and the file."""
    budgets = [{**asdict(budget), "of_limit": budget.of_limit} for budget in report.budgets]
    return {"machine": machine_name(), "versions": versions(), **asdict(report), "budgets": budgets}


def write_json(report: LongReport, folder: Path) -> Path:
    """Writes longctx-MACHINE-DATE.json; returns its path."""
    return write_record("longctx", as_plain(report), folder)


def print_report(report: LongReport, console: Console) -> None:
    """The table, and each answer."""
    links = report.links
    console.print(
        f"[bold]{report.model}[/], {report.dtype} on {report.device}, {report.settings.context_tokens:,} tokens\n"
        f"links: memory {human_bytes(int(links.memory))}/s, disk {human_bytes(int(links.disk))}/s, "
        f"read, checked and copied {human_bytes(int(links.pipeline))}/s\n"
    )
    numeric = ("resident", "blocks", "below", "prefill tok/s", "token", "streamed", "of the limit", "engine's peak")
    table = make_table(("tier", *numeric), numeric=numeric)
    for budget in report.budgets:
        table.add_row(budget.tier, *_cells(budget))
    console.print(table)
    for budget in report.budgets:
        for answer in budget.answers:
            verdict = "right" if answer.is_right else "WRONG"
            where = f"{budget.tier}, {budget.share:.0%} resident"
            console.print(f"{where}: {answer.kind} of {answer.prompt_tokens:,} tokens {verdict}")


def _cells(budget: BudgetFigures) -> tuple[str, ...]:
    return (
        f"{budget.share:.0%}",
        f"{budget.device_blocks:,}",
        f"{budget.host_blocks + budget.disk_blocks:,}",
        f"{budget.prefill_tokens_per_s:,.0f}",
        f"{budget.token_s * 1000:,.1f} ms",
        human_bytes(budget.streamed_bytes),
        "-" if budget.of_limit is None else f"{budget.of_limit:.2f}x",
        human_bytes(budget.engine_peak_bytes),
    )
