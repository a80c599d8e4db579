"""Grammars of structured answers as llguidance reads them, and the limits within which they are built and followed.

The worker that checks a grammar and the engine that follows it build it by this one module, from the same tokenizer,
under the same limits: what was checked is what runs. A grammar is a text in one of llguidance's own forms (Lark, or
JSON that holds a schema); nothing compiled can be sent from process to process.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# The limits are counts, so that they mean the same on every machine. With these the worst grammars that were found take
# about 0.2 s and 70 MB for one mask, after which their own request ends; schemas of a few hundred properties, or of a
# few thousand words, fit.
INITIAL_LEXER_FUEL = 50_000  # nodes of all lexemes together, and of what follows from them at the start
STEP_LEXER_FUEL = 100_000  # nodes that one mask may add
STEP_MAX_ITEMS = 50_000  # Earley items that one mask may add
MAX_ITEMS_IN_ROW = 2_000
MAX_LEXER_STATES = 20_000
MAX_GRAMMAR_SIZE = 100_000  # symbols in all rules

# Building recurses. A grammar that was built on the smaller stack builds on the larger one.
CHECK_STACK_BYTES = 2 << 20
BUILD_STACK_BYTES = 8 << 20

_ECHO = re.compile(r"[0-9]+ +\||\^+$")  # a numbered line of the grammar, or the mark under one


class UnusableTokenizer(Exception):
    """No grammar can be followed with this model's tokenizer."""


class GrammarError(Exception):
    """A grammar that cannot be built, or a matcher that cannot go on; the message is fit for a client to read."""


def load_tokenizer(folder: Path, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """The vocabulary of a model folder, as grammars see it. Holds the interpreter while it loads.

    Raises:
        UnusableTokenizer: there is none that llguidance can read, or it lacks an end token.
    """
    if not eos_token_ids:
        raise UnusableTokenizer("the model names no end token")
    try:
        spec = (folder / "tokenizer.json").read_text(encoding="utf-8")
        return LLTokenizer(spec, eos_token=list(eos_token_ids))
    except OSError:
        raise UnusableTokenizer("the model folder has no tokenizer.json") from None
    except ValueError as error:
        raise UnusableTokenizer(f"grammars cannot use this tokenizer.json ({one_line(str(error))})") from None


def make_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the grammar's start. Lets other threads run meanwhile.

    Raises:
        GrammarError: the grammar is wrong, or exceeds a limit.
    """
    limits = LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW,
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    check_matcher(matcher)
    return matcher


def check_matcher(matcher: LLMatcher) -> None:
    """Raises GrammarError where the matcher has met an error or a limit, which it never leaves again."""
    if matcher.is_error():
        text = one_line(matcher.get_error())
        raise GrammarError("no answer goes on from here" if text == "NoExtensionBias" else text)


def one_line(text: str) -> str:
    """A message of the library without what it repeats of the grammar, at most 400 characters."""
    lines = [line.strip()[:100] for line in text.replace("<non-verbose/>", "").splitlines()]
    told = [" ".join(line.split()) for line in lines if line and not _ECHO.match(line)]
    return " ".join(told)[:400]
