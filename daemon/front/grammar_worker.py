"""A grammar process: `python -m daemon.front.grammar_worker`, spawned, timed and killed by the front.

It builds what a client sends as a structure and follows it for a few tokens, so it may hang, eat memory or run out of
stack. Time is the front's to end, and bounded here too; memory and stack are bounded here. What passes has been built
and followed on a smaller stack than the engine's, and within the engine's own limits.
"""

import argparse
import json
import math
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from daemon.front import grammar_messages as gm
from daemon.front.token_bytes import AddedToken, UnsupportedTokenizer, token_bytes
from daemon.grammar import (
    CHECK_STACK_BYTES,
    GrammarError,
    UnusableTokenizer,
    check_matcher,
    load_tokenizer,
    make_matcher,
    one_line,
)
from daemon.messages import HEADER

MAX_ADDRESS_BYTES = 2 << 30  # of the whole process
MAX_DEPTH = 64  # of a schema
TRIAL_TOKENS = 32  # followed before a grammar passes
# Processor time. The engine builds beside its steps, but a mask is part of one. What takes long to build has large
# expressions in it, and such a thing's masks take long wherever in an answer they come.
MAX_BUILD_S = 0.4
MAX_MASK_S = 0.1
# Without a bound a model may write spaces for ever; trained ones indent deeper than this very seldom.
JSON_SPACE = r"[ \n\r\t]{1,32}"


class Refusal(Exception):
    """What is wrong with a structure."""


class Worker:
    """One model's vocabulary. Answers every question with a reply, whatever is wrong with it."""

    def __init__(self, folder: Path, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = load_tokenizer(folder, eos_token_ids)
        self._eos = frozenset(eos_token_ids)
        _compare(self._tokenizer, (folder / "tokenizer.json").read_text(encoding="utf-8"))

    def reply(self, question: gm.Question) -> gm.Reply:
        """The answer to one question."""
        if isinstance(question, gm.Hello):
            return gm.Loaded()
        try:
            grammar = grammar_of(question)
            _in_small_stack(lambda: self._try(grammar))
        except (Refusal, GrammarError) as error:
            return gm.Failed(str(error))
        return gm.Checked(grammar)

    def _try(self, grammar: str) -> None:
        """Builds it and follows a random answer for a while: what is wrong with a grammar mostly shows at once."""
        began_s = time.thread_time()
        matcher = make_matcher(self._tokenizer, grammar).deep_copy()
        if time.thread_time() - began_s > MAX_BUILD_S:
            raise Refusal("is too complex: it takes too long to build")
        source = random.Random(0)
        for _ in range(TRIAL_TOKENS):
            began_s = time.thread_time()
            mask = matcher.compute_bitmask()
            check_matcher(matcher)
            if time.thread_time() - began_s > MAX_MASK_S:
                raise Refusal("is too complex: a token of it takes too long")
            token_id = _pick(mask, source, self._eos)
            if token_id is None:
                return
            matcher.consume_token(token_id)
            check_matcher(matcher)


def grammar_of(question: gm.Check) -> str:
    """A structure in llguidance's own form; what is wrong inside it shows when it is built.

    Raises:
        Refusal: it is no JSON, or nested too deeply.
    """
    match question.structure:
        case gm.Structure.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(_schema(question.texts[0]), {"whitespace_pattern": JSON_SPACE})
        case gm.Structure.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema({"type": "object"}, {"whitespace_pattern": JSON_SPACE})
        case gm.Structure.REGEX:
            return LLMatcher.grammar_from_regex(question.texts[0])
        case gm.Structure.GRAMMAR:
            return LLMatcher.grammar_from_lark(question.texts[0])
        case gm.Structure.CHOICE:
            alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in question.texts)
            return LLMatcher.grammar_from_lark(f"start: {alternatives}")


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise Refusal(f"is nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:
        raise Refusal(f"is no JSON: {one_line(str(error))}") from None
    if not isinstance(schema, dict):
        raise Refusal("must be a JSON object")
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _inside(outer)]
    if level:
        raise Refusal(f"is nested deeper than {MAX_DEPTH}")
    return cast(dict[str, Any], schema)


def _inside(outer: Any) -> list[Any]:
    values = cast(dict[str, Any], outer).values() if isinstance(outer, dict) else cast(list[Any], outer)
    return list(values)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _pick(mask: bytes, source: random.Random, eos: frozenset[int]) -> int | None:
    """A random token of a mask, bit by bit from the lowest of each byte; None where only an end token is left."""
    start = source.randrange(len(mask))
    for offset in range(len(mask)):
        place = (start + offset) % len(mask)
        if mask[place]:
            found = [8 * place + bit for bit in range(8) if mask[place] >> bit & 1]
            found = [token_id for token_id in found if token_id not in eos]
            if found:
                return source.choice(found)
    return None


def _compare(tokenizer: LLTokenizer, spec: str) -> None:
    """Grammars must see the very bytes that clients are sent.

    Raises:
        UnusableTokenizer: some token has other bytes there.
    """
    known = Tokenizer.from_str(spec)
    added = {id_: AddedToken(token.content, token.special) for id_, token in known.get_added_tokens_decoder().items()}
    decoder = json.loads(spec).get("decoder")
    try:
        table = token_bytes(known.get_vocab(), added, decoder)
    except UnsupportedTokenizer as error:
        raise UnusableTokenizer(str(error)) from None
    for token_id, expected in enumerate(table):
        # 0xFF is in no UTF-8, and is what marks a special token there.
        if expected and b"\xff" not in expected and tokenizer.decode_bytes([token_id]) != expected:
            raise UnusableTokenizer(f"grammars read token {token_id} otherwise than clients")


def _in_small_stack(work: Callable[[], None]) -> None:
    """Runs it in a thread whose stack is smaller than any that the engine uses."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # handed to the thread that waits
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def serve(worker: Worker, source: BinaryIO, sink: BinaryIO, timeout_s: float) -> None:
    """Answers questions until the source ends."""
    while len(header := source.read(HEADER.size)) == HEADER.size:
        (size,) = HEADER.unpack(header)
        body = source.read(size)
        if len(body) < size:
            return
        _bound_processor_time(timeout_s)
        _send(sink, worker.reply(gm.question_decoder.decode(body)))


def _bound_processor_time(timeout_s: float) -> None:
    """The question may take about twice its time, should nobody end it from outside."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, most_s = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(usage.ru_utime + usage.ru_stime + 2 * timeout_s) + 1, most_s))


def _send(sink: BinaryIO, reply: gm.Reply) -> None:
    sink.write(gm.frame(reply))
    sink.flush()


def main() -> int:
    """Exit status 0 at the end of stdin, 1 where the folder's tokenizer cannot be used (told on stdout)."""
    parser = argparse.ArgumentParser(prog="python -m daemon.front.grammar_worker", description="Run by the front.")
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--eos", required=True, help="token ids that end an answer, with commas between them")
    parser.add_argument("--timeout-s", required=True, type=float, help="longest time for a question")
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # the front ends its workers; a terminal's signals go to all
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_BYTES, MAX_ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(CHECK_STACK_BYTES)
    sink = sys.stdout.buffer
    try:
        worker = Worker(args.model, tuple(int(id_) for id_ in args.eos.split(",") if id_))
    except UnusableTokenizer as error:
        _send(sink, gm.Failed(str(error)))
        return 1
    serve(worker, sys.stdin.buffer, sink, args.timeout_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
