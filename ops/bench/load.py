"""Requests of the bench, and when their tokens came."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from downcore.v1 import generation_pb2

from ops.cli.client import GENERATION, Client
from ops.cli.errors import CliError, ExitCode

CALL_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Timed:
    """One answered request, as the client saw it. Times are those of time.perf_counter."""

    sent_s: float
    token_times_s: tuple[float, ...]  # arrival of each token
    num_messages: int  # that carried tokens
    prompt_tokens: int
    cached_tokens: int
    prefill_s: float  # the daemon's own figure

    @property
    def first_token_s(self) -> float:
        """From sending to the first token."""
        return self.token_times_s[0] - self.sent_s

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first."""
        return (len(self.token_times_s) - 1) / (self.token_times_s[-1] - self.token_times_s[0])


class Prompts:
    """Token ids drawn from a seed; no two prompts share their beginning unless asked to."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._random = random.Random(seed)
        self._ids = range(min(1000, vocab_size // 4), vocab_size * 3 // 4)  # clear of special tokens at either end

    def fresh(self, num_tokens: int) -> list[int]:
        """A prompt never seen before."""
        return [self._random.choice(self._ids) for _ in range(num_tokens)]

    def with_new_end(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The prompt with its last tokens drawn anew."""
        return prompt[:-num_tokens] + self.fresh(num_tokens)


def ask(client: Client, prompt: list[int], max_tokens: int) -> Timed:
    """One greedy answer of exactly `max_tokens` tokens."""
    times: list[float] = []
    messages = 0
    summary: generation_pb2.GenerateSummary | None = None
    sent = time.perf_counter()
    for event in _events(client, prompt, max_tokens):
        kind = event.WhichOneof("event")
        if kind == "chunk" and event.chunk.token_ids:
            messages += 1
            times += [time.perf_counter()] * len(event.chunk.token_ids)
        elif kind == "summary":
            summary = event.summary
    if summary is None or len(times) != max_tokens:
        raise CliError(ExitCode.FAILED, f"an answer of {max_tokens} tokens came with {len(times)}")
    usage = summary.usage
    cached = usage.cached_tokens.device + usage.cached_tokens.host + usage.cached_tokens.disk
    return Timed(sent, tuple(times), messages, usage.prompt_tokens, cached, summary.timings.prefill_s)


def follow(client: Client, prompt: list[int], max_tokens: int, on_token: Callable[[float], bool]) -> None:
    """An answer whose every token's arrival is told to `on_token`; cancelled when that returns False."""
    for event in _events(client, prompt, max_tokens):
        if event.WhichOneof("event") == "chunk":
            for _ in event.chunk.token_ids:
                if not on_token(time.perf_counter()):
                    return


def ask_together(client: Client, prompts: list[list[int]], max_tokens: int) -> list[Timed]:
    """All prompts at once, a thread each."""
    results: list[Timed | None] = [None] * len(prompts)
    failures: list[CliError] = []

    def one(index: int) -> None:
        try:
            results[index] = ask(client, prompts[index], max_tokens)
        except CliError as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [result for result in results if result is not None]


def make_request(prompt: list[int], max_tokens: int) -> generation_pb2.GenerateRequest:
    """A greedy answer of exactly `max_tokens` tokens."""
    return generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=prompt),
        sampling=generation_pb2.SamplingParams(temperature=0.0),
        stopping=generation_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
    )


def _events(client: Client, prompt: list[int], max_tokens: int) -> Iterator[generation_pb2.GenerateResponse]:
    request = make_request(prompt, max_tokens)
    return client.stream(f"{GENERATION}/Generate", request, generation_pb2.GenerateResponse, CALL_TIMEOUT_S)
