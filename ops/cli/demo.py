"""downcore demo: a note found and a state remembered by a hybrid model, then two questions about one real document."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from downcore.v1 import admin_pb2, generation_pb2
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from ops.child import ChildDaemon, ending_signals
from ops.cli.app import HELP_NAMES, make_app, run_app
from ops.cli.client import ADMIN, GENERATION, Client, connect
from ops.cli.errors import CliError, ExitCode
from ops.cli.output import human_bytes, human_count, human_seconds, make_console
from ops.cli.tiers import tier_table
from ops.demo.document import QUESTIONS, TITLE, make_prompt, read_document
from ops.demo.recall import read_recalls
from ops.model.catalog import SMOLLM2
from ops.model.fetch import FetchError, ensure_model
from ops.models.shipped import TINY_HYBRID

ANSWER_TOKENS = 48
CALL_TIMEOUT_S = 240.0

app = make_app()


def run(arguments: list[str]) -> int:
    """The command."""
    return run_app(app, "demo", arguments)


@dataclass(frozen=True, slots=True)
class Answered:
    """What one question took."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float


@app.command(context_settings=HELP_NAMES)
def demo(
    model: Annotated[
        Path | None, typer.Option("--model", help="A snapshot folder instead of the embedded model.")
    ] = None,
) -> None:
    """Ask a hybrid model about long texts, then another about a real document; show what the cache saved."""
    console = make_console()
    try:
        folder = model or ensure_model(SMOLLM2, console)
    except FetchError as error:
        raise CliError(ExitCode.FAILED, str(error)) from None
    if model is None:
        _serve(TINY_HYBRID, console, _recall)
    _serve(folder, console, _read)


def _serve(folder: Path, console: Console, talk: Callable[[Client, Console], None]) -> None:
    """A daemon of its own from its start to its orderly end, with the tiers it leaves."""
    with ending_signals(), ChildDaemon(folder) as daemon:
        _introduce(console, _wait(daemon, console))
        with connect(str(daemon.socket)) as client:
            talk(client, console)
            tiers = client.unary(f"{ADMIN}/ListTiers", admin_pb2.ListTiersRequest(), admin_pb2.ListTiersResponse, 10.0)
        console.print()
        console.print(tier_table(tiers.tiers))
        daemon.stop()
    console.print("\ndaemon stopped cleanly\n")


def _recall(client: Client, console: Console) -> None:
    for recall in read_recalls():
        console.print(f"\n[dim]{recall.what}:[/]", end="")
        cold = _ask(client, console, recall.question, recall.prompt)
        warm = _ask(client, console, f"{recall.question} (again)", recall.prompt)
        for answered in (cold, warm):
            if answered.text.strip() != recall.expected:
                raise CliError(ExitCode.FAILED, f"the answer is {recall.expected!r}, not {answered.text!r}")
        _compare(console, cold, warm)


def _read(client: Client, console: Console) -> None:
    console.print(f"document: {TITLE}")
    first, second = (_ask(client, console, q.text, make_prompt(read_document(), q)) for q in QUESTIONS)
    _compare(console, first, second)


def _wait(daemon: ChildDaemon, console: Console) -> admin_pb2.GetServerInfoResponse:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("loading the model", total=1.0)
        return daemon.wait_serving(lambda loaded: progress.update(task, completed=loaded))


def _introduce(console: Console, info: admin_pb2.GetServerInfoResponse) -> None:
    console.print(
        f"[bold]{info.model}[/] on {info.device}: {human_count(info.parameters)} parameters in {info.dtype}, "
        f"{human_bytes(info.bytes_per_token)} of cache a token, blocks of {info.block_size}, grid {info.grid:,}"
    )


def _ask(client: Client, console: Console, question: str, prompt: str) -> Answered:
    request = generation_pb2.GenerateRequest(
        text=prompt,
        sampling=generation_pb2.SamplingParams(temperature=0.0),
        stopping=generation_pb2.StoppingParams(max_tokens=ANSWER_TOKENS, stop=["\n"]),
    )
    console.print(f"\n[bold cyan]{question}[/]")
    answered = None
    text = ""
    events = client.stream(f"{GENERATION}/Generate", request, generation_pb2.GenerateResponse, CALL_TIMEOUT_S)
    try:
        for event in events:
            kind = event.WhichOneof("event")
            if kind == "chunk":
                piece = event.chunk.text if text else event.chunk.text.lstrip()
                text += piece
                print(piece, end="", flush=True)
            elif kind == "summary":
                usage, timings = event.summary.usage, event.summary.timings
                answered = Answered(text, usage.prompt_tokens, _cached(usage), timings.first_token_s)
    finally:
        print(flush=True)  # what follows, an error too, begins its own line
    if answered is None or not text:
        raise CliError(ExitCode.FAILED, "the answer came without text or without its summary")
    console.print(
        f"[dim]{answered.prompt_tokens:,} prompt tokens, {answered.cached_tokens:,} from the cache; "
        f"first token after {human_seconds(answered.first_token_s)}[/]"
    )
    return answered


def _compare(console: Console, first: Answered, second: Answered) -> None:
    if not second.cached_tokens:
        raise CliError(ExitCode.FAILED, "the second question found nothing in the cache")
    saved_s = first.first_token_s - second.first_token_s
    console.print(
        f"\nThe second time took [bold]{second.cached_tokens:,} of {second.prompt_tokens:,}[/] prompt tokens "
        f"from the cache: first token after {human_seconds(second.first_token_s)} instead of "
        f"{human_seconds(first.first_token_s)}, [bold]{saved_s:.1f} s saved[/]."
    )


def _cached(usage: generation_pb2.Usage) -> int:
    cached = usage.cached_tokens
    return cached.device + cached.host + cached.disk
