"""Two questions about one long text, put to an engine in this process with all of it on the device, or little of it.

The text has a needle in its first half and a device's states in its second. Both questions end the same text, so the
second finds the first one's prefix, wherever that lies.
"""

import time
from array import array
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer

from daemon.config import EngineConfig
from daemon.engine.engine import Engine
from daemon.engine.start import start
from daemon.messages import Rejected, SamplingParams, Started, StepOutput, Submit, ToFront
from daemon.sizing import CHECKPOINT_SHARE
from ops.models.shipped import TINY_HYBRID
from tests.semantic.needles import ANSWER_TOKENS, needle, status

GRID = 512  # two chunks are less than a twentieth of 32,768 tokens
BLOCK = 64
AIMS = 4  # at a length
DEPTH, LAST = 0.4, 0.9  # of their halves: where the needle and the last state are
PLACES = ("resident", "host", "disk")


@dataclass(frozen=True, slots=True)
class Asked:
    """One question's tokens and its only right answer."""

    kind: str
    prompt_ids: tuple[int, ...]
    expected: str


@dataclass(frozen=True, slots=True)
class Replied:
    """What came of it. Blocks and bytes are those of the last token's forward."""

    kind: str
    text: str
    is_right: bool
    prompt_tokens: int
    cached_tokens: int
    blocks_on_device: int
    blocks_below: int
    streamed_bytes: int
    seconds: float


def questions(seed: int, num_tokens: int) -> tuple[Asked, Asked]:
    """Both questions about one text: as long as a context of so many tokens allows, within a percent or two."""
    longest, aim, best = num_tokens - ANSWER_TOKENS, float(num_tokens), tuple[Asked, ...]()
    for _ in range(AIMS):
        asked = _asked(seed, int(aim))
        most = max(len(one.prompt_ids) for one in asked)
        if most <= longest and (not best or most > len(best[0].prompt_ids)):
            best = asked
        aim *= 0.998 * longest / most
    needle_asked, status_asked = best
    return needle_asked, status_asked


def _asked(seed: int, aim: int) -> tuple[Asked, ...]:
    made = needle(seed, aim // 2, DEPTH), status(seed, aim // 2, LAST)
    text = "\n\n".join(question.messages[0]["content"] for question in made)
    chats = [_chat(text, question.messages[1]["content"]) for question in made]
    encoded = [tokenizer().encode(chat, add_special_tokens=False).ids for chat in chats]
    return tuple(Asked(q.kind, tuple(ids), q.expected) for q, ids in zip(made, encoded, strict=True))


@dataclass(frozen=True, slots=True)
class Room:
    """How much of a context is on the device, and where the rest lies."""

    place: str  # of PLACES
    num_tokens: int
    share: float  # of the context, on the device


def ask(room: Room, asked: tuple[Asked, ...], folder: Path) -> list[Replied]:
    """One engine, one question after the other, greedily."""
    replies: list[Replied] = []
    with _engine(room, folder) as (engine, messages):
        for one in asked:
            began = time.monotonic()
            ids = array("i", one.prompt_ids).tobytes()
            params = SamplingParams(seed=0, temperature=0.0)
            engine.handle(Submit(one.kind, ids, 1, ANSWER_TOKENS, 0, (_stop_id(),), params, ""))
            on_device = below = streamed = 0
            with torch.inference_mode():
                while not (engine.is_idle and engine.cache.is_settled):
                    engine.step()
                    if engine.scheduler.running:
                        sequence = engine.scheduler.running[0]
                        below = sum(block >= engine.device.blocks.size for block in sequence.block_table)
                        on_device = len(sequence.block_table) - below
                        streamed = sequence.stream.last_row.num_bytes if sequence.stream is not None else 0
                    if engine.only_waits:
                        time.sleep(0.001)
            engine.check()
            refused = [message for message in messages if isinstance(message, Rejected)]
            assert not refused, refused
            (usage,) = (message.usage for message in messages if isinstance(message, Started))
            tokens = [
                token.token_id for message in messages if isinstance(message, StepOutput) for token in message.tokens
            ]
            messages.clear()
            text = tokenizer().decode(tokens).strip()
            cached = usage.cached_device + usage.cached_host + usage.cached_disk
            replies.append(
                Replied(
                    one.kind, text, text == one.expected, len(one.prompt_ids), cached, on_device, below, streamed,
                    round(time.monotonic() - began, 1),
                )
            )  # fmt: skip
    return replies


@contextmanager
def _engine(room: Room, folder: Path) -> Generator[tuple[Engine, list[ToFront]]]:
    messages: list[ToFront] = []

    def begin(pool_bytes: int, **more: object) -> Engine:
        config = EngineConfig(
            str(TINY_HYBRID), pool_bytes=pool_bytes, grid=GRID, block_size=BLOCK, threads=1, max_sequences=1,
            stream_share=1.0, break_even=False, restore_timeout_s=600.0, **more,  # type: ignore[arg-type]
        )  # fmt: skip
        return start(config, send=messages.append, progress=lambda done, total: None)[0]

    probe = begin(64 << 20)
    layout = probe.device.layout
    probe.close()
    pool_bytes = int((1 + room.share * room.num_tokens) / BLOCK + 1) * layout.block_bytes + 8 * layout.slot_bytes
    if room.place == "resident":  # beside what checkpoints may take
        pool_bytes = int(pool_bytes / (1 - CHECKPOINT_SHARE))
    below_bytes = (room.num_tokens + 4 * GRID) // BLOCK * layout.block_bytes + 8 * layout.slot_bytes
    settings: dict[str, object] = {}
    if room.place == "host":
        settings = {"host_bytes": 2 * below_bytes}
    elif room.place == "disk":
        settings = {"disk_path": str(folder), "spill_bytes": 2 * below_bytes}
    engine = begin(pool_bytes, **settings)
    try:
        yield engine, messages
    finally:
        engine.close()


def _chat(text: str, question: str) -> str:
    """As the model's template writes a text and a question about it."""
    return f"<|im_start|>system\n{text}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


@cache
def tokenizer() -> Tokenizer:
    """The model folder's."""
    return Tokenizer.from_file(str(TINY_HYBRID / "tokenizer.json"))


def _stop_id() -> int:
    stop_id = tokenizer().token_to_id("<|im_end|>")
    assert stop_id is not None
    return stop_id
