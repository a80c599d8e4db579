"""What the front's bench leaves behind: a JSON file and tables."""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from ops.bench.front_run import FrontSettings, Pings, SideBySide
from ops.bench.report import machine_name, versions, write_record
from ops.cli.output import make_table


@dataclass(frozen=True, slots=True)
class FrontReport:
    """One run."""

    settings: FrontSettings
    message_bytes: int
    streams: tuple[SideBySide, ...]
    pings: Pings


def as_plain(report: FrontReport) -> dict[str, Any]:
    """For JSON."""
    now = datetime.now(UTC)
    about = {"date": now.isoformat(timespec="seconds"), "machine": machine_name(), "versions": versions()}
    return {**about, **asdict(report)}


def write_json(report: FrontReport, folder: Path) -> Path:
    """Writes front-MACHINE-DATE.json; returns its path."""
    return write_record("front", as_plain(report), folder)


def print_report(report: FrontReport, console: Console) -> None:
    """All tables."""
    rate = f"{report.settings.rate:g} tokens a second and stream" if report.settings.rate else "as fast as they go"
    console.print(f"messages of {report.message_bytes} bytes, one token each, {rate}\n")
    numeric = ("streams", "front msg/s", "echo msg/s", "ratio", "front us", "echo us", "client us")
    table = make_table(numeric, numeric=numeric)
    for row in report.streams:
        table.add_row(
            str(row.streams),
            f"{row.front.messages_per_s:,.0f}",
            f"{row.echo.messages_per_s:,.0f}",
            f"{row.speed_ratio:.2f}",
            f"{row.front.server_cpu_us:.1f}",
            f"{row.echo.server_cpu_us:.1f}",
            f"{row.front.client_cpu_us:.1f} / {row.echo.client_cpu_us:.1f}",
        )
    console.print(table)
    console.print(
        f"\nus: processor time of the process a message. Unary ping: {report.pings.front_ms:.2f} ms, "
        f"echo {report.pings.echo_ms:.2f} ms"
    )
