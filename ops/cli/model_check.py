"""downcore model check PATH: what a model needs, before it is loaded."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ops.cli.app import Format, FormatOption
from ops.cli.errors import CliError, ExitCode
from ops.cli.output import human_bytes, human_count, make_console, make_facts, make_table, print_data
from ops.model.check import CheckError, check_folder


def check(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A snapshot folder.")],
    pool_bytes: Annotated[
        int | None, typer.Option("--pool-bytes", min=1, help="Budget for blocks and slots. Default: what a CPU takes.")
    ] = None,
    max_sequences: Annotated[int | None, typer.Option("--max-sequences", min=1, help="Served at a time.")] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """What a model needs, from its configuration and headers alone. Exits 1 when the folder cannot be served."""
    if not path.is_dir():
        raise CliError(ExitCode.NOT_FOUND, f"{path} is not a folder")
    try:
        report = check_folder(path, pool_bytes=pool_bytes, max_sequences=max_sequences)
    except CheckError as error:
        raise CliError(ExitCode.FAILED, str(error)) from None
    if output is not Format.TABLE:
        print_data(report, output)
        return
    console = make_console()
    console.print(make_facts(_facts(report)))
    if report["budget"]["fits"]:
        table = make_table(("CONTEXT", "SEQUENCES"), numeric=("CONTEXT", "SEQUENCES"))
        for fit in report["budget"]["fits"]:
            table.add_row(f"{fit['context_tokens']:,}", f"{fit['num_sequences']:,}")
        console.print()
        console.print(table)


def _facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    weights, budget = report["weights"], report["budget"]
    files = "none in the folder"
    if weights is not None:
        size = human_bytes(weights["file_bytes"])
        files = f"{size} in {weights['num_tensors']} tensors, files: {weights['num_files']}"
    holds = budget["problem"] or (
        f"{budget['num_tokens']:,} tokens in {budget['num_blocks']:,} blocks, {budget['num_slots']:,} slots"
    )
    return [
        ("Family", report["family"]),
        ("Parameters", f"{human_count(report['num_parameters'])} ({report['num_parameters']:,})"),
        ("Weights in memory", f"{human_bytes(report['weight_bytes'])} ({report['dtype']})"),
        ("Weights on disk", files),
        ("Context", f"{report['max_context_tokens']:,} tokens"),
        ("A token", f"{report['bytes_per_token']:,} bytes in {report['num_planes']} planes"),
        (
            "A sequence",
            f"{report['slot_payload_bytes']:,} fixed bytes in {report['num_slot_tensors']} slot tensors"
            if report["num_slot_tensors"]
            else "no fixed bytes",
        ),
        ("A block", f"{report['block_size']} tokens, {human_bytes(report['block_bytes'])}"),
        ("Budget", f"{human_bytes(budget['pool_bytes'])} for at most {budget['max_sequences']} sequences"),
        ("It holds", holds),
    ]
