"""Two daemons behind a gateway that this project did not write, and the OpenAI client before it."""

import json
import math
import re
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from downcore.v1 import generation_pb2 as pb

from ops.models.shipped import TINY_HYBRID
from tests.e2e.daemon import Daemon, running, summary_of
from tests.front.harness import eventually, text_of
from tests.gateway.smg import Smg, running_smg

GRID = 128
FLAGS = (
    "--gateway", "true", "--tcp", "127.0.0.1:0", "--threads", "1", "--grid", str(GRID), "--max-sequences", "8",
    "--pool-bytes", str(128 << 20),
)  # fmt: skip
MODEL = TINY_HYBRID.name
NUM_ROUTED = 100
CHAT: list[Any] = [{"role": "user", "content": "Say hello, and then tell me what a tree is."}]


@dataclass(frozen=True, slots=True)
class Fleet:
    smg: Smg
    daemons: tuple[Daemon, Daemon]

    @property
    def client(self) -> openai.OpenAI:
        return self.smg.openai

    def assert_idle(self) -> None:
        """No daemon holds anything for anybody, and what is lost or found is nothing."""
        for daemon in self.daemons:
            eventually(lambda daemon=daemon: not daemon.sequences())
            ledger = daemon.ledger()
            assert ledger.balanced, ledger.findings
            assert not [entry for entry in ledger.entries if entry.owner.startswith(("chatcmpl", "cmpl"))]


def address_of(daemon: Daemon) -> str:
    return daemon.ready_line.rpartition(", ")[2].strip()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Generator[Fleet]:
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two", "smg")]
    with (
        running(folders[0], TINY_HYBRID, *FLAGS) as one,
        running(folders[1], TINY_HYBRID, *FLAGS) as two,
        running_smg(folders[2], TINY_HYBRID, [address_of(one), address_of(two)]) as smg,
    ):
        yield Fleet(smg, (one, two))


def prose(num_words: int, salt: int) -> str:
    """Text that is not the beginning of any other salt's."""
    words = ["river", "stone", "lamp", "winter", "paper", "garden", "iron", "seven", "cloud", "bread"]
    return " ".join(words[(i * i + salt * 7 + i * salt) % len(words)] + str((i * salt) % 90) for i in range(num_words))


def test_chat_is_what_the_daemon_itself_says(fleet: Fleet) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role=turn["role"], content=turn["content"]) for turn in CHAT])
    own = fleet.daemons[0].generate(
        chat=chat, sampling=pb.SamplingParams(temperature=0), stopping=pb.StoppingParams(max_tokens=24)
    )
    answer = fleet.client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=24, temperature=0)
    (choice,) = answer.choices
    assert choice.message.content == text_of(own)
    assert choice.message.content
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == summary_of(own).usage.prompt_tokens
    assert answer.usage.completion_tokens == summary_of(own).usage.completion_tokens
    fleet.assert_idle()


def test_a_streamed_chat_is_the_same_text_with_its_usage(fleet: Fleet) -> None:
    whole = fleet.client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=24, temperature=0)
    stream = fleet.client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert sum(bool(piece) for piece in pieces) > 3, "it came in one piece"
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert ends == [whole.choices[0].finish_reason]
    (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
    assert whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_completions_choices_and_stops(fleet: Fleet) -> None:
    prompt = "The colour of the sky is"
    own = fleet.daemons[1].generate(
        text=prompt, sampling=pb.SamplingParams(temperature=0),
        stopping=pb.StoppingParams(max_tokens=12, ignore_eos=True),
    )  # fmt: skip
    extra = {"ignore_eos": True}
    whole = fleet.client.completions.create(model=MODEL, prompt=prompt, max_tokens=12, temperature=0, extra_body=extra)
    assert whole.choices[0].text == text_of(own)
    assert whole.choices[0].finish_reason == "length"
    stream = fleet.client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=12, temperature=0, stream=True, extra_body=extra
    )
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == whole.choices[0].text
    stop = whole.choices[0].text[5:8]
    cut = fleet.client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=12, temperature=0, stop=[stop], extra_body=extra
    )
    assert cut.choices[0].text == whole.choices[0].text.partition(stop)[0]
    assert cut.choices[0].finish_reason == "stop"
    several = fleet.client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=12, temperature=1.5, n=3, seed=5, extra_body=extra
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len({choice.text for choice in several.choices}) == 3
    assert several.usage is not None
    assert several.usage.completion_tokens == 36
    again = fleet.client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=12, temperature=1.5, n=3, seed=5, extra_body=extra
    )
    assert [choice.text for choice in again.choices] == [choice.text for choice in several.choices]


def test_chat_logprobs_are_a_distribution(fleet: Fleet) -> None:
    answer = fleet.client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=6, temperature=0, logprobs=True, top_logprobs=4
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    for position in logprobs.content:
        assert position.top_logprobs[0].token == position.token
        assert sum(math.exp(top.logprob) for top in position.top_logprobs) <= 1.0 + 1e-4


def test_an_answer_has_the_structure_that_was_asked_for(fleet: Fleet) -> None:
    schema = {"name": "x", "strict": True, "schema": {"enum": ["red", "green"]}}
    by_schema: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": schema}}
    by_regex: dict[str, Any] = {"extra_body": {"regex": "(one|two) [0-9]{3}"}}
    for seed in range(3):
        colour, number = (
            fleet.client.chat.completions.create(
                model=MODEL, messages=CHAT, max_tokens=60, temperature=1.0, seed=seed, **structure
            )
            .choices[0]
            .message.content
            or ""
            for structure in (by_schema, by_regex)
        )
        assert json.loads(colour) in ("red", "green")
        assert re.fullmatch("(one|two) [0-9]{3}", number)


def test_the_pages_example_runs(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "ops" / "docs" / "gateway.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(program.replace("127.0.0.1:30000", f"127.0.0.1:{fleet.smg.port}"), {})
    shown = capsys.readouterr().out
    text, usage, _ = shown.partition(" CompletionUsage(")
    assert text
    assert usage
    assert shown.endswith(f"\n{text}"), "the stream says the same"


def test_a_refusal_reaches_the_client_as_its_own_fault(fleet: Fleet) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        fleet.client.completions.create(model=MODEL, prompt="a", max_tokens=4, extra_body={"min_p": 0.5, "n": 9})
    assert "sampling_params.n" in str(caught.value)
    fleet.assert_idle()


def test_usage_tells_what_came_from_the_cache(fleet: Fleet) -> None:
    prompt = prose(400, 3)
    first, second = (
        fleet.client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, temperature=0) for _ in range(2)
    )
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.prompt_tokens > 4 * GRID
    assert first.usage.prompt_tokens_details is None or not first.usage.prompt_tokens_details.cached_tokens
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == (second.usage.prompt_tokens - 1) // GRID * GRID
    assert second.choices[0].text == first.choices[0].text


def test_a_client_that_hangs_up_frees_the_blocks(fleet: Fleet) -> None:
    stream = fleet.client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    )
    for _ in range(3):
        next(stream)
    (row,) = [row for daemon in fleet.daemons for row in daemon.sequences()]
    assert row.blocks > 0
    stream.close()
    fleet.assert_idle()


def holds(daemon: Daemon) -> int:
    """Answers that a daemon has given; each request here has one token."""
    return daemon.info().answer_tokens


def test_requests_go_where_their_prefix_is(fleet: Fleet, tmp_path: Path) -> None:
    """The prefixes are computed past the gateway, which can know of them by the daemons' events alone.

    One is there before the gateway is, and so in the snapshot; the other comes afterwards, and so in a batch. The
    gateway has the tokenizer from the daemons.
    """
    one, two = fleet.daemons
    early, late = prose(500, 11), prose(500, 13)
    compute(one, early)
    with running_smg(tmp_path, None, [address_of(daemon) for daemon in fleet.daemons]) as smg:
        eventually(lambda: smg.num_blocks() > 0)
        num_before = smg.num_blocks()
        compute(two, late)
        eventually(lambda: smg.num_blocks() > num_before)
        before = [holds(daemon) for daemon in fleet.daemons]

        def ask(number: int) -> int:
            prefix = early if number % 2 else late
            answer = smg.openai.completions.create(
                model=MODEL, prompt=f"{prefix} and question {number}", max_tokens=1, temperature=0,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            details = answer.usage.prompt_tokens_details if answer.usage is not None else None
            return (details.cached_tokens or 0) if details is not None else 0

        with ThreadPoolExecutor(4) as pool:
            cached = list(pool.map(ask, range(NUM_ROUTED)))
    answered = [holds(daemon) - count for daemon, count in zip(fleet.daemons, before, strict=True)]
    assert sum(answered) == NUM_ROUTED
    num_hits = sum(tokens >= 4 * GRID for tokens in cached)
    print(f"{num_hits} of {NUM_ROUTED} requests found their prefix; the daemons answered {answered}")
    assert num_hits >= 0.95 * NUM_ROUTED
    assert min(answered) >= 0.45 * NUM_ROUTED, "both prefixes went to one daemon"
    fleet.assert_idle()


def compute(daemon: Daemon, text: str) -> None:
    daemon.generate(text=text, stopping=pb.StoppingParams(max_tokens=1))
