"""downcore generate: one prompt, streamed to the terminal."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from downcore.v1 import generation_pb2

from ops.cli.app import HELP_NAMES, Format, FormatOption, ServerOption, make_app, run_app
from ops.cli.client import GENERATION, connect
from ops.cli.errors import CliError, ExitCode
from ops.cli.output import as_dict, counted, enum_name, human_seconds, print_json
from ops.cli.prompt import make_chat, read_prompt
from ops.cli.quantities import MAX_UINT32
from ops.cli.structure import make_structure

app = make_app()


def run(arguments: list[str]) -> int:
    """The command."""
    return run_app(app, "generate", arguments)


@app.command(context_settings=HELP_NAMES)
def generate(
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from stdin.")] = None,
    prompt_file: Annotated[Path | None, typer.Option("--prompt-file", help="Read the prompt from a file.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="System message before it, with --chat.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, max=MAX_UINT32, help="Default: as many as fit.")
    ] = None,
    min_tokens: Annotated[
        int, typer.Option("--min-tokens", min=0, max=MAX_UINT32, help="No end before this many.")
    ] = 0,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")] = None,
    stop_id: Annotated[
        list[int] | None, typer.Option("--stop-id", min=0, max=MAX_UINT32, help="End at this token id.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end token.")] = False,
    number: Annotated[int | None, typer.Option("--n", "-n", min=1, max=8, help="Number of answers.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 is greedy. Default 1.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=0, max=MAX_UINT32, help="Keep the k best tokens.")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="Keep this much probability.")] = None,
    min_p: Annotated[float | None, typer.Option("--min-p", help="Keep tokens this fraction of the best.")] = None,
    typical_p: Annotated[float | None, typer.Option("--typical-p", help="Locally typical sampling.")] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option("--repetition-penalty", help="Divide by this what was seen.")
    ] = None,
    presence_penalty: Annotated[float | None, typer.Option("--presence-penalty", help="Subtract once a token.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option("--frequency-penalty", help="Subtract each time.")] = None,
    logit_bias: Annotated[list[str] | None, typer.Option("--logit-bias", metavar="ID=BIAS", help="Repeatable.")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, max=2**64 - 1, metavar="SEED", help="Draw the same again.")
    ] = None,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Print each token's log-probability.")] = False,
    top_logprobs: Annotated[int, typer.Option("--top-logprobs", min=0, max=20, help="And of the best ones.")] = 0,
    json_schema: Annotated[
        Path | None, typer.Option("--json-schema", metavar="FILE", help="Answers are JSON of this schema.")
    ] = None,
    regex: Annotated[str | None, typer.Option("--regex", help="Answers match this as a whole.")] = None,
    grammar: Annotated[
        Path | None, typer.Option("--grammar", metavar="FILE", help="Answers follow this Lark grammar.")
    ] = None,
    choice: Annotated[list[str] | None, typer.Option("--choice", help="Answers are one of these; repeatable.")] = None,
    any_json: Annotated[bool, typer.Option("--json", help="Answers are any object of JSON.")] = False,
    request_id: Annotated[str, typer.Option("--request-id", help="Your own name for the request.")] = "",
    stats: Annotated[bool, typer.Option("--stats", help="Usage and timings on stderr, at the end.")] = False,
    server: ServerOption = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Longest wait.")
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Stream an answer to a prompt. Ctrl-C cancels it. With -o json, one event a line."""
    sampling = generation_pb2.SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=_parse_biases(logit_bias or []),
        seed=seed,
        logprobs=logprobs or top_logprobs > 0,
        top_logprobs=top_logprobs,
    )
    stopping = generation_pb2.StoppingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=stop or [],
        stop_token_ids=stop_id or [],
        ignore_eos=ignore_eos,
    )
    structure = make_structure(
        json_schema=json_schema, regex=regex, grammar=grammar, choices=choice or [], any_json=any_json
    )
    request = generation_pb2.GenerateRequest(
        request_id=request_id, sampling=sampling, stopping=stopping, n=number, structured_output=structure
    )
    if output is Format.CSV:
        raise CliError(ExitCode.USAGE, "-o csv is for lists; an answer is a stream of events: -o jsonl")
    text = read_prompt(prompt, prompt_file)
    if chat:
        request.chat.CopyFrom(make_chat(text, system))
    elif system is not None:
        raise CliError(ExitCode.USAGE, "--system needs --chat")
    else:
        request.text = text
    with connect(server) as client:
        events = client.stream(f"{GENERATION}/Generate", request, generation_pb2.GenerateResponse, timeout)
        if output is not Format.TABLE:
            for event in events:
                print_json(as_dict(event), one_line=True)
        else:
            _print_answers(events, number or 1, show_logprobs=sampling.logprobs, stats=stats)


def _print_answers(
    events: Iterator[generation_pb2.GenerateResponse], number: int, *, show_logprobs: bool, stats: bool
) -> None:
    """One answer as it comes; of several the first as it comes and the others after it, in order."""
    printer = _Printer(number)
    try:
        for event in events:
            kind = event.WhichOneof("event")
            if kind == "chunk" and show_logprobs:
                _print_logprobs(event.chunk, number)
            elif kind == "chunk":
                printer.add(event.chunk.index, event.chunk.text)
            elif kind == "finished":
                if not show_logprobs:
                    printer.finish(event.finished.index)
                if stats:
                    print(_finish_line(event.finished), file=sys.stderr)
            elif kind == "summary" and stats:
                print("\n".join(summary_lines(event.summary)), file=sys.stderr)
    except (CliError, KeyboardInterrupt):
        printer.break_line()
        raise


class _Printer:
    """Text of several answers on one stdout: the lowest unfinished one streams, the others wait in `_waiting`."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._waiting = [""] * number
        self._finished = [False] * number
        self._current = 0
        self._inside_line = False
        if number > 1:
            print("--- 0", flush=True)

    def add(self, index: int, text: str) -> None:
        if index == self._current:
            self._write(text)
        elif index < self._number:
            self._waiting[index] += text

    def finish(self, index: int) -> None:
        if index < self._number:
            self._finished[index] = True
        while self._current < self._number and self._finished[self._current]:
            print(flush=True)
            self._inside_line = False
            self._current += 1
            if self._current < self._number:
                print(f"--- {self._current}", flush=True)
                self._write(self._waiting[self._current])

    def break_line(self) -> None:
        """After an interruption, so that what follows begins its own line."""
        if self._inside_line:
            print(flush=True)

    def _write(self, text: str) -> None:
        if text:
            print(text, end="", flush=True)
            self._inside_line = not text.endswith("\n")


def _print_logprobs(chunk: generation_pb2.GenerateChunk, number: int) -> None:
    """A token a line: its log-probability, its text, then the best ones."""
    for position in chunk.logprobs:
        prefix = f"{chunk.index}  " if number > 1 else ""
        best = "".join(f"  {_token(top)}" for top in position.top)
        print(f"{prefix}{_token(position.chosen)}{'   |' if best else ''}{best}", flush=True)


def _token(token: generation_pb2.TokenLogprob) -> str:
    text = json.dumps(token.token.decode("utf-8", errors="backslashreplace"), ensure_ascii=False)
    return f"{token.logprob:8.4f} {text}"


def _finish_line(finished: generation_pb2.GenerateFinished) -> str:
    reason = enum_name(generation_pb2.FinishReason.DESCRIPTOR, finished.reason).lower()
    by = finished.WhichOneof("stopped_by")
    if by == "stop_string":
        reason += f" at {finished.stop_string!r}"
    elif by == "stop_token_id":
        reason += f" at token {finished.stop_token_id}"
    return f"answer {finished.index}: {counted(finished.completion_tokens, 'token')}, {reason}"


def summary_lines(summary: generation_pb2.GenerateSummary) -> list[str]:
    """Usage and timings for people."""
    usage, timings = summary.usage, summary.timings
    cached = usage.cached_tokens
    tiers = {name: count for name, count in _cached(cached).items() if count}
    names = tuple(tiers) if len(tiers) < 2 else tuple(f"{count:,} {name}" for name, count in tiers.items())
    from_cache = (
        f"{sum(tiers.values()):,} of them from the cache ({', '.join(names)})" if tiers else "none from the cache"
    )
    decode_s = timings.total_s - timings.first_token_s
    rate = f", {(usage.completion_tokens - 1) / decode_s:.1f} tokens/s after the first" if decode_s > 0 else ""
    return [
        f"prompt {counted(usage.prompt_tokens, 'token')}, {from_cache}; "
        f"answer {counted(usage.completion_tokens, 'token')}",
        f"queue {human_seconds(timings.queue_s)}, prefill {human_seconds(timings.prefill_s)}, "
        f"first token {human_seconds(timings.first_token_s)}, total {human_seconds(timings.total_s)}{rate}",
    ]


def _cached(cached: generation_pb2.CachedTokens) -> dict[str, int]:
    return {"device": cached.device, "host": cached.host, "disk": cached.disk}


def _parse_biases(biases: list[str]) -> dict[int, Any]:
    """ "17=-2.5" is {17: -2.5}."""
    parsed: dict[int, float] = {}
    for bias in biases:
        token_id, equals, value = bias.partition("=")
        try:
            if not equals or not 0 <= int(token_id) <= MAX_UINT32:
                raise ValueError
            parsed[int(token_id)] = float(value)
        except ValueError:
            raise CliError(ExitCode.USAGE, f"--logit-bias {bias!r} is not ID=BIAS") from None
    return parsed
