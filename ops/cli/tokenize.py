"""downcore tokenize."""

from pathlib import Path
from typing import Annotated

import typer
from downcore.v1 import generation_pb2

from ops.cli.app import HELP_NAMES, Format, FormatOption, ServerOption, TimeoutOption, make_app, run_app
from ops.cli.client import GENERATION, connect
from ops.cli.errors import CliError, ExitCode
from ops.cli.output import counted, make_console, make_table, print_data, print_json
from ops.cli.prompt import make_chat, read_prompt

app = make_app()


def run(arguments: list[str]) -> int:
    """The command."""
    return run_app(app, "tokenize", arguments)


@app.command(context_settings=HELP_NAMES)
def tokenize(
    prompt: Annotated[str | None, typer.Argument(metavar="TEXT", help="The text; - reads it from stdin.")] = None,
    prompt_file: Annotated[Path | None, typer.Option("--prompt-file", help="Read the text from a file.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the text into the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="System message before it, with --chat.")] = None,
    server: ServerOption = None,
    timeout: TimeoutOption = 30.0,
    output: FormatOption = Format.TABLE,
) -> None:
    """Token ids of a text, exactly as generate would make them."""
    text = read_prompt(prompt, prompt_file)
    request = generation_pb2.TokenizeRequest()
    if chat:
        request.chat.CopyFrom(make_chat(text, system))
    elif system is not None:
        raise CliError(ExitCode.USAGE, "--system needs --chat")
    else:
        request.text = text
    with connect(server) as client:
        answer = client.unary(f"{GENERATION}/Tokenize", request, generation_pb2.TokenizeResponse, timeout)
    texts = [token.decode("utf-8", errors="backslashreplace") for token in answer.tokens]
    if output is Format.JSON:
        print_json({"token_ids": list(answer.token_ids), "tokens": texts})
        return
    if output is not Format.TABLE:
        rows = zip(answer.token_ids, texts, strict=True)
        print_data([{"token_id": token_id, "token": token} for token_id, token in rows], output)
        return
    table = make_table(("position", "id", "token"), numeric=("position", "id"))
    for position, (token_id, token) in enumerate(zip(answer.token_ids, texts, strict=True)):
        table.add_row(str(position), str(token_id), repr(token).replace("[", "\\["))
    console = make_console()
    console.print(table)
    console.print(counted(len(answer.token_ids), "token"))
