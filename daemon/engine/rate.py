"""How fast prompts are computed here, as far as has been seen."""


class PrefillRate:
    """Tokens a second of the fastest whole chunk of late: a busy spell refuses nobody, and a lucky one fades."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0  # 0 until there was a chunk

    def saw(self, num_tokens: int, seconds: float) -> None:
        """A chunk is whole."""
        self.tokens_per_s = max(self.tokens_per_s * 0.98, num_tokens / max(seconds, 1e-6))

    def seconds(self, start: int, end: int) -> float:
        """The least time that prompt positions [start, end) take; 0 where nothing is known yet."""
        return (end - start) / self.tokens_per_s if self.tokens_per_s else 0.0
