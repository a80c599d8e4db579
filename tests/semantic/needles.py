"""Questions about long texts, from the generator that ships with tiny-hybrid, and how they are put to a daemon.

A needle question asks for a note somewhere in the text: its answer comes out of KV blocks. A status question asks for
the last of a device's states: its answer comes out of the recurrent state.
"""

import ast
import hashlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from downcore.v1 import generation_pb2 as pb

from ops.models.shipped import TINY_HYBRID
from tests.e2e.daemon import Daemon, summary_of

GRID = 1024  # tokens; the daemon's own on a CPU
ANSWER_TOKENS = 16  # more than any expected answer has
TIMEOUT_S = 1200.0

Message = dict[str, str]  # role, content


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt and its only right answer."""

    name: str
    kind: str  # needle, status or multi
    messages: tuple[Message, ...]
    prompt: str  # the same messages as the model's template writes them
    expected: str


@dataclass(frozen=True, slots=True)
class Case:
    """A ready case: a question with its known size, and in a conversation what is asked after it."""

    question: Question
    num_tokens: int
    turns: tuple[tuple[str, str], ...]  # (question, expected), the first one included; empty where there is one alone


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    text: str
    prompt_tokens: int
    cached_tokens: int  # on the device
    seconds: float


@cache
def ready_cases() -> tuple[Case, ...]:
    """All cases that the model was seen to answer, each rebuilt and compared with its digest."""
    lines = (TINY_HYBRID / "needles.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(_case(json.loads(line)) for line in lines)


def needle(seed: int, num_tokens: int, depth: float) -> Question:
    """A note at `depth` of the text, among eight others."""
    made = _generator()["make"](seed, num_tokens, depth)
    return _question(f"needle-{seed}-{num_tokens}-{depth}", "needle", made)


def status(seed: int, num_tokens: int, last: float) -> Question:
    """A device that changes state six times, the last time at `last` of the text."""
    made = _generator()["status"](seed, num_tokens, last)
    return _question(f"status-{seed}-{num_tokens}-{last}", "status", made)


def ask(daemon: Daemon, messages: tuple[Message, ...]) -> Answer:
    """Puts a chat to the daemon, greedily."""
    responses = daemon.generate(
        timeout=TIMEOUT_S,
        chat=pb.Chat(messages=[pb.ChatMessage(**message) for message in messages]),
        sampling=pb.SamplingParams(temperature=0.0),
        stopping=pb.StoppingParams(max_tokens=ANSWER_TOKENS),
    )
    summary = summary_of(responses)
    assert summary.usage.cached_tokens.host == summary.usage.cached_tokens.disk == 0
    return Answer(
        text="".join(r.chunk.text for r in responses if r.HasField("chunk")),
        prompt_tokens=summary.usage.prompt_tokens,
        cached_tokens=summary.usage.cached_tokens.device,
        seconds=summary.timings.total_s,
    )


def floor_of(num_tokens: int) -> int:
    """Tokens of a prompt that come out of the cache when the same prompt was served before."""
    return (num_tokens - 1) // GRID * GRID


def _case(row: dict[str, Any]) -> Case:
    call = ast.parse(row["call"], mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    arguments = [ast.literal_eval(argument) for argument in call.args]
    options = {option.arg: ast.literal_eval(option.value) for option in call.keywords if option.arg is not None}
    made = _generator()[call.func.id](*arguments, **options)
    assert hashlib.sha256(made["prompt"].encode()).hexdigest() == row["sha256"], row["id"]
    assert (made["question"], made["expected"]) == (row["question"], row["expected"])
    turns = tuple((turn["question"], turn["expected"]) for turn in row.get("turns", ()))
    return Case(_question(row["id"], row["kind"], made), row["tokens"], turns)


def _question(name: str, kind: str, made: dict[str, Any]) -> Question:
    return Question(name, kind, tuple(made["messages"]), made["prompt"], made["expected"])


@cache
def _generator() -> dict[str, Callable[..., dict[str, Any]]]:
    """The functions of the folder's own file, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("make_needle", TINY_HYBRID / "make_needle.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {"make": module.make, "status": module.status}
