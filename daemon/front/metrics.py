"""What the front counts of requests. All of it belongs to the event loop's thread; nothing here ever goes down.

On a token's way there is one histogram entry and no more; the rest is counted when a request starts or ends.
"""

from collections import Counter

from daemon import messages
from daemon.front.ended import End, Ended
from tiers.meters import Histogram

# Those that vLLM uses for the same things, so that its dashboards' quantiles are ours as well.
FIRST_TOKEN_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
TOKEN_GAP_BOUNDS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BOUNDS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
LENGTH_BOUNDS = tuple(float(1 << power) for power in (4, 6, 8, 10, 12, 13, 14, 15, 16, 17, 18, 19, 20))  # tokens


class RequestMeters:
    """Of all Generate calls since the front's start, over all engines that it had."""

    def __init__(self) -> None:
        self.first_token_s = Histogram(FIRST_TOKEN_BOUNDS_S)
        self.token_gap_s = Histogram(TOKEN_GAP_BOUNDS_S)  # between two tokens of one answer
        self.request_s = Histogram(REQUEST_BOUNDS_S)
        self.queue_s = Histogram(REQUEST_BOUNDS_S)
        self.prefill_s = Histogram(REQUEST_BOUNDS_S)
        self.decode_s = Histogram(REQUEST_BOUNDS_S)
        self.prompt_len = Histogram(LENGTH_BOUNDS)
        self.answer_len = Histogram(LENGTH_BOUNDS)  # of all answers of a request together
        self.answer_tokens = 0  # that an engine made
        self.prompt_tokens = 0  # of prompts that were computed
        self.cached_tokens: Counter[str] = Counter()  # of those, the ones that a tier gave, by tier
        self.ends: Counter[End] = Counter()  # of answers

    def prompt_computed(self, usage: messages.Usage) -> None:
        """The engine has all of a prompt."""
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens["device"] += usage.cached_device
        self.cached_tokens["host"] += usage.cached_host
        self.cached_tokens["disk"] += usage.cached_disk

    def request_ended(self, ended: Ended) -> None:
        """A request has left the table."""
        self.ends.update(ended.ends)
        if ended.error is None and End.CANCELLED not in ended.ends:
            self.request_s.observe(ended.duration_s)
        if ended.usage is not None:
            self.prompt_len.observe(ended.usage.prompt_tokens)
            self.answer_len.observe(ended.completion_tokens)
            self.prefill_s.observe(ended.usage.prefill_s)
        if ended.queue_s is not None:
            self.queue_s.observe(ended.queue_s)
        if ended.decode_s is not None:
            self.decode_s.observe(ended.decode_s)
