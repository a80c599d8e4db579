"""From tokens to text: each token's bytes are decoded as they come, and stop strings are held back.

What must hold, for any way of cutting a text into tokens: no piece of text ends inside a UTF-8 sequence; the visible
text is the same; it never shows any part of the stop string that ended it.
"""

import codecs
import re
from collections.abc import Sequence

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TokenTable:
    """The bytes of every token of a vocabulary. Special tokens and ids without a token have none."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = tuple(tokens)

    def __getitem__(self, token_id: int) -> bytes:
        # A model's output may be wider than its tokenizer's vocabulary, padded to a round number.
        return self._tokens[token_id] if token_id < len(self._tokens) else b""

    def __len__(self) -> int:
        return len(self._tokens)


class StopMatcher:
    """Finds the stop string that is completed first, the longest of those that are completed together.

    For each stop string it keeps how much of it the text ends with (Knuth, Morris and Pratt), so a character costs a
    step for each string however the text is cut; while nothing of any is matched, it skips to where one may begin.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop string that the text now ends with
        self._begin = re.compile("|".join(re.escape(stop[0]) for stop in self._stops))

    @property
    def held_len(self) -> int:
        """Characters at the text's end that may still turn out to belong to a stop string."""
        return max(self._matched, default=0)

    def begin_in(self, text: str) -> int:
        """Where a stop string may begin in a text that nothing of one comes before; its length where none does."""
        found = self._begin.search(text)
        return found.start() if found is not None else len(text)

    def feed(self, char: str) -> str | None:
        """Takes the text's next character. Returns: the stop string it completes."""
        found: str | None = None
        for i, stop in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != char:
                matched = self._fallbacks[i][matched]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                found = found or stop
                matched = self._fallbacks[i][matched]
            self._matched[i] = matched
        return found


def _fallbacks(stop: str) -> list[int]:
    """For each length, the longest proper prefix of stop[:length] that is its suffix too."""
    table = [0, 0]
    length = 0
    for char in stop[1:]:
        while length and stop[length] != char:
            length = table[length]
        if stop[length] == char:
            length += 1
        table.append(length)
    return table


class TextStream:
    """The text of one answer. `add` returns what became visible; `stop` is the stop string that ended it."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = _utf8_decoder("replace")
        self._is_whole = True  # the decoder holds no bytes of a sequence that goes on
        self._matcher = StopMatcher(stops) if stops else None
        self._held = ""
        self.stop: str | None = None

    def add(self, token: bytes, *, may_stop: bool = True) -> str:
        """Takes the next token's bytes. `may_stop` False shows them without looking for a stop string."""
        if self._is_whole and token.isascii():
            text = token.decode("ascii")
        else:
            text = self._decoder.decode(token)
            self._is_whole = not self._decoder.getstate()[0]
        return self._reveal(text, may_stop) if self._matcher is not None else text

    def finish(self) -> str:
        """The rest, once no token follows: what was held back, and a replacement character for a cut sequence."""
        if self.stop is not None:
            return ""
        text = self._reveal(self._decoder.decode(b"", True), True)
        held, self._held = self._held, ""
        return text + held

    def _reveal(self, text: str, may_stop: bool) -> str:
        matcher = self._matcher
        if matcher is None:
            return text
        if self.stop is not None:
            return ""
        if not may_stop:
            return text
        if self._held:
            unseen = len(self._held)
            text = self._held + text
        else:
            unseen = matcher.begin_in(text)
            if unseen == len(text):
                return text
        for end in range(unseen, len(text)):
            self.stop = matcher.feed(text[end])
            if self.stop is not None:
                self._held = ""
                return text[: end + 1 - len(self.stop)]
        visible_len = len(text) - matcher.held_len
        self._held = text[visible_len:]
        return text[:visible_len]
