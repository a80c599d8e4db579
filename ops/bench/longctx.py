"""One long context with ever less of it on the device: what its tokens cost, and whether its answers are still right.

Each budget is a daemon of its own: everything resident first, then each share of the context with the rest in the
host tier or on disk. Each computes the prompt once. Then they take turns, a round after the other, to answer it again
from what they have of it: so what else the machine does falls on all of them alike, and one that waits costs nothing.

What a token may cost at best is measured here too: the link below the device, and the pipeline that reads it as a
forward does, checksum and copy included, each by itself with the whole machine; and the resident step, in the same
rounds. The limit is the slowest of the three, as if they did not share cores.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from downcore.v1 import admin_pb2, generation_pb2

from ops.bench.load import Prompts, make_request
from ops.child import ChildDaemon
from ops.cli.client import ADMIN, GENERATION, Client, connect
from ops.cli.errors import CliError, ExitCode
from tiers.files import aligned_buffer
from tiers.layout import Plane, StateLayout
from tiers.resources import Resources
from tiers.spill import Spill
from tiers.spill_reader import SpillReader

CALL_TIMEOUT_S = 86_400.0
AIMS = 4  # at a length
LONGEST_ANSWER = 16  # tokens: more than any right one has
CHECKPOINT_SHARE = 0.25  # of a pool, the most that the engine gives to checkpoints
RESERVED_SLOTS = 3  # a sequence's, padding's and the shadow
LINK_BYTES = 256 << 20  # moved to measure a link
LINK_PLANES = 8


@dataclass(frozen=True, slots=True)
class LongSettings:
    """What to measure. `shares` are of the context; all of it is measured first, where `with_whole` says so."""

    context_tokens: int
    answer_tokens: int
    shares: tuple[float, ...]
    tiers: tuple[str, ...]  # host, disk
    grid: int
    threads: int
    seed: int
    with_whole: bool
    questions: tuple[str, ...]  # needle, status; none: random tokens
    rounds: int  # in which all answer again, one after the other; of questions none


@dataclass(frozen=True, slots=True)
class Links:
    """Bytes a second."""

    memory: float  # copied from memory to memory by one thread
    disk: float  # read from a file as the spill lays it out, page cache included
    pipeline: float  # the same by the spill's reader: read, compared with checksums, copied out


@dataclass(frozen=True, slots=True)
class Answered:
    """A question whose only right answer is known."""

    kind: str
    prompt_tokens: int
    expected: str
    is_right: bool
    prefill_s: float
    token_s: float | None  # median time between tokens of the answer; None where it has one token


@dataclass(frozen=True, slots=True)
class BudgetFigures:
    """One daemon. Blocks and streamed bytes are those of a decoded token in the middle of the answer."""

    tier: str  # resident, host or disk
    share: float
    pool_blocks: int
    pool_bytes: int
    context_blocks: int
    device_blocks: int
    host_blocks: int
    disk_blocks: int
    prefill_tokens_per_s: float
    token_s: float
    streamed_bytes: int
    limit_token_s: float | None  # what the slowest of link, pipeline and the resident step allows
    engine_peak_bytes: int  # of resident memory
    answers: tuple[Answered, ...]

    @property
    def of_limit(self) -> float | None:
        """How many times the limit a token takes."""
        return None if self.limit_token_s is None else self.token_s / self.limit_token_s


@dataclass(frozen=True, slots=True)
class LongReport:
    """One run."""

    model: str
    dtype: str
    device: str
    settings: LongSettings
    links: Links
    budgets: tuple[BudgetFigures, ...]


@dataclass(frozen=True, slots=True)
class _Prompt:
    kind: str
    request: generation_pb2.GenerateRequest
    expected: str


@dataclass(frozen=True, slots=True)
class _Served:
    """What came of one prompt."""

    text: str
    times_s: tuple[float, ...]
    prompt_tokens: int
    prefill_s: float
    sequence: admin_pb2.Sequence | None  # None: the answer was too short to look


class LongMeasurement:
    """Figures of one model.

    Args:
        tell: called with what is being measured.
    """

    def __init__(self, model: Path, settings: LongSettings, tell: Callable[[str], None]) -> None:
        self._model = model
        self._settings = settings
        self._tell = tell

    def measure(self) -> LongReport:
        """Everything resident, then every share in every tier.

        Raises:
            CliError: a daemon ended, or an answer is not as long as asked for.
        """
        self._tell("starting")
        with ChildDaemon(self._model, ["--threads", str(self._settings.threads)]) as daemon:
            info = daemon.wait_serving(lambda _: None)
        if self._settings.context_tokens > info.max_context_tokens:
            limit = f"{info.max_context_tokens:,}"
            raise CliError(ExitCode.USAGE, f"a context of {self._settings.context_tokens:,} tokens is over {limit}")
        block_bytes = info.block_size * info.bytes_per_token
        settings = self._settings
        wanted = [("resident", 1.0)] if settings.with_whole else []
        wanted += [(tier, share) for tier in settings.tiers for share in settings.shares]
        with tempfile.TemporaryDirectory(prefix="downcore-bench-") as folder, ExitStack() as stack:
            self._tell("the links below the device")
            links = measure_links(Path(folder), block_bytes, settings.grid // info.block_size)
            served: list[_Budget] = []
            for tier, share in wanted:
                served.append(self._begin(info, tier, share, Path(folder) / f"{tier} {share}"))
                stack.callback(served[-1].close)
                self._serve_first(served[-1], info.vocab_size)
                if not settings.rounds:
                    served[-1].close()
            for number in range(settings.rounds):
                for budget in served:
                    self._tell(f"round {number + 1} of {settings.rounds}: {budget.tier}, {budget.share:.0%} resident")
                    budget.gaps_s += _gaps_s(_serve(budget.client, budget.served[0][0].request))
            figures = [budget.figures(info) for budget in served]
        resident_token_s = figures[0].token_s if settings.with_whole else 0.0
        budgets = [one if one.tier == "resident" else limited(one, links, resident_token_s) for one in figures]
        return LongReport(info.model, info.dtype, info.device, settings, links, tuple(budgets))

    def _begin(self, info: admin_pb2.GetServerInfoResponse, tier: str, share: float, folder: Path) -> "_Budget":
        settings = self._settings
        num_blocks = int(share * settings.context_tokens) // info.block_size + 2
        block_bytes = info.block_size * info.bytes_per_token
        slots_bytes = RESERVED_SLOTS * info.slot_bytes
        pool_bytes = num_blocks * block_bytes + slots_bytes
        if info.slot_bytes:
            pool_bytes = max(int(pool_bytes / (1 - CHECKPOINT_SHARE)), 2 * slots_bytes)
        below_bytes = (settings.context_tokens // info.block_size + 2 * settings.grid // info.block_size) * block_bytes
        arguments = ["--pool-bytes", str(pool_bytes), "--max-sequences", "1", "--threads", str(settings.threads)]
        arguments += ["--grid", str(settings.grid), "--stream-share", "1.0"]
        if tier == "host":
            arguments += ["--host-bytes", str(below_bytes + slots_bytes)]
        if tier == "disk":
            arguments += ["--disk-path", str(folder), "--spill-bytes", str(below_bytes), "--break-even", "false"]
        return _Budget(tier, share, self._model, arguments)

    def _serve_first(self, budget: "_Budget", vocab_size: int) -> None:
        """Every prompt once, from nothing."""
        for prompt in self._prompts(budget.client, vocab_size):
            below = f", the rest: {budget.tier}" if budget.share < 1 else ""
            self._tell(f"{prompt.kind}, {budget.share:.0%} resident{below}")
            budget.served.append((prompt, _serve(budget.client, prompt.request)))

    def _prompts(self, client: Client, vocab_size: int) -> Iterator[_Prompt]:
        settings = self._settings
        for kind in settings.questions:
            chat, expected = self._question(client, kind)
            request = generation_pb2.GenerateRequest(
                chat=chat,
                sampling=generation_pb2.SamplingParams(temperature=0.0),
                stopping=generation_pb2.StoppingParams(max_tokens=LONGEST_ANSWER),
            )
            yield _Prompt(kind, request, expected)
        if not settings.questions:
            prompt = Prompts(settings.seed, vocab_size).fresh(settings.context_tokens - settings.answer_tokens)
            yield _Prompt("random tokens", make_request(prompt, settings.answer_tokens), "")

    def _question(self, client: Client, kind: str) -> tuple[generation_pb2.Chat, str]:
        """As long as the context allows: what the generator aims at is met within a few percent, so it is corrected."""
        longest = self._settings.context_tokens - LONGEST_ANSWER
        aim, best = longest, None
        for _ in range(AIMS):
            made = _make_question(self._model, kind, self._settings.seed, int(aim))
            messages = [generation_pb2.ChatMessage(**message) for message in made["messages"]]
            chat = generation_pb2.Chat(messages=messages)
            request = generation_pb2.TokenizeRequest(chat=chat)
            counted = client.unary(f"{GENERATION}/Tokenize", request, generation_pb2.TokenizeResponse, 600.0)
            num_tokens = len(counted.token_ids)
            if num_tokens <= longest and (best is None or num_tokens > best[0]):
                best = (num_tokens, chat, made["expected"])
            aim *= 0.997 * longest / num_tokens
        if best is None:
            raise CliError(ExitCode.FAILED, f"no {kind} question is at most {longest:,} tokens long")
        return best[1], best[2]


class _Budget:
    """One daemon, which serves until it is closed, and what it has answered."""

    def __init__(self, tier: str, share: float, model: Path, arguments: list[str]) -> None:
        self.tier = tier
        self.share = share
        self.served: list[tuple[_Prompt, _Served]] = []
        self.gaps_s: list[float] = []  # between the tokens of later rounds
        self._stack = ExitStack()
        self._peak_bytes = 0
        try:
            self._daemon = self._stack.enter_context(ChildDaemon(model, arguments))
            self._daemon.wait_serving(lambda _: None)
            self.client = self._stack.enter_context(connect(str(self._daemon.socket)))
            asked = admin_pb2.ListTiersRequest()
            self._device = self.client.unary(f"{ADMIN}/ListTiers", asked, admin_pb2.ListTiersResponse, 60.0).tiers[0]
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        """Ends the daemon, once; what it took of memory stays known."""
        if not self._peak_bytes:
            asked = admin_pb2.GetServerInfoRequest()
            info = self.client.unary(f"{ADMIN}/GetServerInfo", asked, admin_pb2.GetServerInfoResponse, 60.0)
            self._peak_bytes = _peak_bytes(info.engine_pid)
            self._daemon.stop()
            self._stack.close()

    def figures(self, info: admin_pb2.GetServerInfoResponse) -> BudgetFigures:
        """Raises CliError where an answer was too short to measure."""
        self.close()
        first = self.served[0][1]
        if first.sequence is None:
            raise CliError(ExitCode.FAILED, f"an answer ended after {len(first.times_s)} tokens: too few to measure")
        residency = first.sequence.residency
        return BudgetFigures(
            tier=self.tier,
            share=self.share,
            pool_blocks=self._device.blocks,
            pool_bytes=self._device.capacity_bytes,
            context_blocks=-(-first.sequence.computed_tokens // info.block_size),
            device_blocks=first.sequence.blocks,
            host_blocks=residency.host_blocks,
            disk_blocks=residency.disk_blocks,
            prefill_tokens_per_s=first.prompt_tokens / first.prefill_s,
            token_s=median(self.gaps_s or _gaps_s(first) or [0.0]),
            streamed_bytes=residency.streamed_bytes,
            limit_token_s=None,
            engine_peak_bytes=self._peak_bytes,
            answers=tuple(_answered(prompt, one) for prompt, one in self.served if prompt.expected),
        )


def measure_links(folder: Path, block_bytes: int, chunk_blocks: int) -> Links:
    """Rates of this machine, each over LINK_BYTES.

    Args:
        folder: of the file that is read.
        chunk_blocks: blocks of a grid chunk, of which one plane's part is read at a time.
    """
    source, target = np.ones(LINK_BYTES, np.uint8), np.full(LINK_BYTES, 2, np.uint8)  # both touched
    began = time.perf_counter()
    np.copyto(target, source)
    memory = LINK_BYTES / (time.perf_counter() - began)
    part_bytes = max(256, block_bytes // LINK_PLANES // 256 * 256)
    layout = StateLayout(tuple(Plane(f"p{i}", "uint8", (part_bytes,)) for i in range(LINK_PLANES)), (), 1)
    extent_bytes = chunk_blocks * layout.block_bytes
    num_extents = max(1, LINK_BYTES // extent_bytes)
    spill = Spill(layout, folder, chunk_blocks=chunk_blocks, num_extents=num_extents)
    reader = SpillReader(spill, cache_bytes=0)
    owner = Resources("bench")
    images = [memoryview(os.urandom(layout.block_bytes)) for _ in range(chunk_blocks)]
    for _ in range(num_extents):
        extent = spill.take(owner)
        assert extent is not None
        spill.write(extent, images)
    # As a row's forward reads: all of one plane, then the next.
    blocks = list(range(num_extents * chunk_blocks))
    out = aligned_buffer(part_bytes * len(blocks))[: part_bytes * len(blocks)]
    out[:] = bytes(len(out))
    began = time.perf_counter()
    for part in layout.block_parts:
        spill.read_unchecked(0, part, out)
    disk_s = time.perf_counter() - began
    began = time.perf_counter()
    reader.announce((part, number) for part in layout.block_parts for number in range(num_extents))
    for part in layout.block_parts:
        reader.fill(out, part, blocks)
    pipeline_s = time.perf_counter() - began
    owner.release()
    spill.close()
    num_bytes = len(layout.block_parts) * len(out)
    return Links(memory, num_bytes / disk_s, num_bytes / pipeline_s)


def limited(figures: BudgetFigures, links: Links, resident_token_s: float) -> BudgetFigures:
    """With what a token may cost at best: the slowest of the link, the pipeline and the step with all resident."""
    link_s = figures.streamed_bytes / (links.memory if figures.tier == "host" else links.disk)
    pipeline_s = figures.streamed_bytes / links.pipeline if figures.tier == "disk" else 0.0
    return replace(figures, limit_token_s=max(link_s, pipeline_s, resident_token_s))


def _serve(client: Client, request: generation_pb2.GenerateRequest) -> _Served:
    """Puts one request, and looks at its sequence when its second token has come."""
    texts: list[str] = []
    times: list[float] = []
    sequence, summary = None, None
    for event in client.stream(f"{GENERATION}/Generate", request, generation_pb2.GenerateResponse, CALL_TIMEOUT_S):
        kind = event.WhichOneof("event")
        if kind == "chunk":
            texts.append(event.chunk.text)
            times += [time.perf_counter()] * len(event.chunk.token_ids)
        elif kind == "summary":
            summary = event.summary
        if sequence is None and len(times) >= 2:
            listed = client.unary(
                f"{ADMIN}/ListSequences", admin_pb2.ListSequencesRequest(), admin_pb2.ListSequencesResponse, 600.0
            )
            sequence = next(iter(listed.sequences), None)
    if summary is None or not times:
        raise CliError(ExitCode.FAILED, "an answer ended without a token")
    return _Served("".join(texts), tuple(times), summary.usage.prompt_tokens, summary.timings.prefill_s, sequence)


def _gaps_s(served: _Served) -> list[float]:
    """Between tokens."""
    return [after - before for before, after in pairwise(served.times_s)]


def _answered(prompt: _Prompt, served: _Served) -> Answered:
    return Answered(
        kind=prompt.kind,
        prompt_tokens=served.prompt_tokens,
        expected=prompt.expected,
        is_right=served.text.strip() == prompt.expected,
        prefill_s=served.prefill_s,
        token_s=median(_gaps_s(served)) if len(served.times_s) > 1 else None,
    )


def _make_question(model: Path, kind: str, seed: int, aim: int) -> dict[str, Any]:
    """From the generator that ships with the model, in a process of its own: a note or a state in a long text."""
    script = model / "make_needle.py"
    command = [sys.executable, str(script), str(seed), str(aim), "0.5", *(["status"] * (kind == "status"))]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise CliError(ExitCode.FAILED, f"{script} makes no question: {made.stderr.strip()[-200:]}")
    return json.loads(made.stdout)


def _peak_bytes(pid: int) -> int:
    """The most memory that a process has had resident."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0
