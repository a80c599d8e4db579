"""Long contexts, answered: all ready cases of tiny-hybrid, and questions from rotating seeds, in every way of running.

`make campaign semantic` puts each of the 40 ready cases to a daemon cold and again from the cache; then, to a fresh
one, questions of 2K, 8K and 32K tokens all at once beside a decoding stream, cold and from the cache. It writes its
figures to results/semantic.json and fails when one answer is wrong or one prompt was not resumed where it should be.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ops.models.shipped import TINY_HYBRID
from tests.campaigns.budget import first_seed
from tests.e2e.daemon import Daemon, running
from tests.semantic.crowd import ask_all_at_once, decoding_beside
from tests.semantic.needles import GRID, Answer, Case, Question, ask, floor_of, needle, ready_cases, status

FLAGS = ("--dtype", "bfloat16", "--threads", "2", "--slice-ms", "50", "--max-sequences", "16", "--pool-bytes")
POOL_BYTES = 1 << 30
RESULT = Path("tests/campaigns/results/semantic.json")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One question, asked once."""

    name: str
    way: str  # cold, cached, turn, batch cold, batch cached
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    is_right: bool
    is_resumed: bool  # exactly as many tokens came from the cache as were published


def main() -> int:
    """The whole campaign."""
    seed, began = first_seed(), time.monotonic()
    outcomes: list[Outcome] = []
    with _fresh_daemon() as daemon:
        for case in ready_cases():
            outcomes += _conversation(daemon, case) if case.turns else _twice(daemon, case)
            print(outcomes[-1], flush=True)
    questions = _crowd(seed)
    with _fresh_daemon() as daemon, decoding_beside(daemon):
        cold = ask_all_at_once(daemon, questions)
        cached = ask_all_at_once(daemon, questions)
    for question, first, second in zip(questions, cold, cached, strict=True):
        outcomes.append(_outcome(question, "batch cold", first, 0))
        outcomes.append(_outcome(question, "batch cached", second, floor_of(first.prompt_tokens)))
    bad = [outcome for outcome in outcomes if not outcome.is_right or not outcome.is_resumed]
    result = {
        "campaign": "semantic",
        "seed": seed,
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "seconds": round(time.monotonic() - began, 1),
        "ready_cases": len(ready_cases()),
        "ready_cases_right": sum(_is_good(outcomes, case) for case in ready_cases()),
        "questions_in_batch": len(questions),
        "answers": len(outcomes),
        "answers_right": sum(outcome.is_right for outcome in outcomes),
        "cached_tokens": sum(outcome.cached_tokens for outcome in outcomes),
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{result['answers_right']} of {len(outcomes)} answers right, {result['cached_tokens']} tokens from the cache"
    )
    for outcome in bad:
        print(f"wrong: {outcome}")
    return 1 if bad else 0


@contextmanager
def _fresh_daemon() -> Generator[Daemon]:
    """One that has cached nothing."""
    with (
        tempfile.TemporaryDirectory(prefix="dc-", dir="/tmp") as folder,
        running(Path(folder), TINY_HYBRID, *FLAGS, str(POOL_BYTES)) as daemon,
    ):
        yield daemon


def _twice(daemon: Daemon, case: Case) -> list[Outcome]:
    """Cold, then from the cache."""
    first, second = ask(daemon, case.question.messages), ask(daemon, case.question.messages)
    assert first.prompt_tokens == case.num_tokens
    return [
        _outcome(case.question, "cold", first, 0),
        _outcome(case.question, "cached", second, floor_of(case.num_tokens)),
    ]


def _conversation(daemon: Daemon, case: Case) -> list[Outcome]:
    """Turn after turn, each resumed from what the one before published."""
    outcomes: list[Outcome] = []
    messages, published = case.question.messages, 0
    for number, (question, expected) in enumerate(case.turns):
        if number:
            messages = (*messages, {"role": "user", "content": question})
        answer = ask(daemon, messages)
        turn = Question(case.question.name, case.question.kind, messages, "", expected)
        outcomes.append(_outcome(turn, "turn" if number else "cold", answer, published))
        published = answer.prompt_tokens // GRID * GRID
        messages = (*messages, {"role": "assistant", "content": answer.text})
    return outcomes


def _crowd(seed: int) -> list[Question]:
    """Both kinds at 2K, 8K and 32K tokens, at several depths."""
    questions = [needle(seed + i, 2048, depth) for i, depth in enumerate((0.05, 0.5, 0.95))]
    questions += [status(seed + i, 2048, last) for i, last in enumerate((0.4, 0.9, 1.0))]
    questions += [needle(seed + 10 + i, 8192, depth) for i, depth in enumerate((0.05, 0.95))]
    questions += [status(seed + 10 + i, 8192, last) for i, last in enumerate((0.4, 1.0))]
    return [*questions, needle(seed + 20, 32_768, 0.5), status(seed + 20, 32_768, 0.9)]


def _outcome(question: Question, way: str, answer: Answer, published: int) -> Outcome:
    return Outcome(
        name=question.name,
        way=way,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        seconds=round(answer.seconds, 2),
        is_right=answer.text == question.expected,
        is_resumed=answer.cached_tokens == published,
    )


def _is_good(outcomes: list[Outcome], case: Case) -> bool:
    return all(outcome.is_right for outcome in outcomes if outcome.name == case.question.name)


if __name__ == "__main__":
    sys.exit(main())
