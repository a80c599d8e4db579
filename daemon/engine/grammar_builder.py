"""Grammars on their way to be followed: built beside the steps, by a thread of their own, and kept for a while.

Who touches what: the builder's thread writes a Grammar once, and nobody before that; from then on it is the engine
thread's alone. What one namespace has had built is no quicker for another.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from queue import SimpleQueue

from llguidance import LLMatcher, LLTokenizer

from daemon.grammar import BUILD_STACK_BYTES, GrammarError, UnusableTokenizer, make_matcher

MAX_KEPT = 16  # built is quickly built again; the worst takes 35 MB

log = logging.getLogger("downcore.engine")


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """A matcher at the grammar's start, which is copied and never advanced, and the ids that its masks cover."""

    start: LLMatcher
    vocab_size: int


@dataclass(slots=True, eq=False)
class Grammar:
    """One grammar; requests that ask for the same share it. Until it is built it has neither."""

    built: Built | None = None
    fault: str | None = None  # why it cannot be built

    @property
    def is_ready(self) -> bool:
        """Nothing more will come of it."""
        return self.built is not None or self.fault is not None


class GrammarBuilder:
    """Builds grammars in the order in which they are asked for.

    Args:
        load: reads the vocabulary; raises UnusableTokenizer.
        wake: called by the builder's thread after each; whoever has nothing else to do may sleep until then.
    """

    def __init__(self, load: Callable[[], LLTokenizer], wake: Callable[[], None]) -> None:
        self._load = load
        self._wake = wake
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[bytes, Grammar] = OrderedDict()
        self._jobs: SimpleQueue[tuple[str, Grammar] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def prepare(self) -> None:
        """Reads the vocabulary at once: later that would hold up a step. Without a usable one no grammar is built."""
        try:
            self._tokenizer = self._load()
        except UnusableTokenizer as error:
            log.warning("no structured output: %s", error)

    def build(self, text: str, namespace: str) -> Grammar:
        """The grammar of a text that was checked; ready at once where the namespace has had it built lately."""
        key = blake2b(f"{namespace}\0{text}".encode(), digest_size=32).digest()
        grammar = self._kept.pop(key, None)
        if grammar is None:
            grammar = Grammar()
            self._start()
            self._jobs.put((text, grammar))
        self._kept[key] = grammar
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return grammar

    def close(self) -> None:
        """Ends the thread after what it is building now; what waits is not built."""
        while not self._jobs.empty():
            self._jobs.get()
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        if self._thread is None:
            before = threading.stack_size(BUILD_STACK_BYTES)
            self._thread = threading.Thread(target=self._work, name="grammars", daemon=True)
            self._thread.start()
            threading.stack_size(before)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            text, grammar = job
            try:
                if self._tokenizer is None:
                    self._tokenizer = self._load()
                grammar.built = Built(make_matcher(self._tokenizer, text), self._tokenizer.vocab_size)
            except (GrammarError, UnusableTokenizer) as error:
                grammar.fault = str(error)
            except BaseException:  # a panic of the library is no Exception; this thread is the only one that builds
                log.exception("a grammar could not be built")
                grammar.fault = "it cannot be built here"
            self._wake()
