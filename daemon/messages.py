"""What front and engine say to each other: typed messages over one inherited socket pair.

Each message is a 4-byte big-endian length and that many bytes of MessagePack. Both ends check the length before they
allocate. There is no path, no listener and no pickle: the socket is made by the front before it spawns the engine, so
the death of either side is an end-of-file at the other.

What they say about prefixes, tiers and quotas is in daemon/cache_messages.py, about blocks that come and go in
daemon/kv_messages.py; both are part of the unions below.
"""

import struct
from enum import StrEnum

import msgspec

from daemon.cache_messages import CacheToEngine, CacheToFront, TierName
from daemon.config import EngineConfig
from daemon.errors import ErrorReason
from daemon.kv_messages import KvToEngine, KvToFront
from daemon.meter_messages import Loaded, Meters

MAX_MESSAGE_BYTES = 64 << 20
HEADER = struct.Struct(">I")


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens are drawn; already validated by the front. `seed` is that of choice 0; choice i uses seed + i."""

    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    logprobs: bool = False
    top_logprobs: int = 0


class StopReason(StrEnum):
    """Why a sequence ended."""

    STOP_TOKEN = "stop_token"  # an end token of the model or a stop id of the request
    LENGTH = "length"  # max_tokens, or the context limit
    STOP_STRING = "stop_string"  # the front saw a stop string and sent StopSequence
    ABORTED = "aborted"  # Abort, an operator, or shutdown


# Front to engine


class Configure(msgspec.Struct, frozen=True, tag=True):
    """The first message of all: what to load and how large everything is."""

    config: EngineConfig
    log_format: str = "auto"  # of daemon/logs.py


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A request: `n` answers to one prompt. `prompt_ids` is little-endian int32, 4 bytes a token."""

    request_id: str
    prompt_ids: bytes
    n: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    sampling: SamplingParams
    namespace: str
    deadline_s: float | None = None  # seconds from now
    grammar: str | None = None  # what every answer must match, in llguidance's form; already checked by the front


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Ends a request, or one choice of it, wherever it is: queued, prefilling, decoding. Unknown ids are ignored.

    Of a Warm nothing more is sent; of a Submit each choice's Finished.
    """

    request_id: str
    index: int | None = None


class StopSequence(msgspec.Struct, frozen=True, tag=True):
    """Ends one choice because its text reached a stop string; tokens after `num_tokens` do not count."""

    request_id: str
    index: int
    num_tokens: int


class QueryKind(StrEnum):
    """What an operator can look at."""

    TIERS = "tiers"
    SEQUENCES = "sequences"
    LEDGER = "ledger"
    METERS = "meters"  # and the tiers with them


class Query(msgspec.Struct, frozen=True, tag=True):
    """Asks for a table; answered by an Answer with the same `query_id`."""

    query_id: int
    kind: QueryKind
    id: str = ""  # SEQUENCES: only this sequence or request


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Release everything, prove the ledger, exit 0."""


# Engine to front


class EngineInfo(msgspec.Struct, frozen=True):
    """What a loaded engine is; fixed for its life."""

    model: str
    family: str
    parameters: int
    dtype: str
    device: str
    vocab_size: int
    max_context_tokens: int
    block_size: int
    grid: int
    num_blocks: int
    num_slots: int
    bytes_per_token: int
    slot_bytes: int
    state_fingerprint: str
    numerics_profile: str
    eos_token_ids: tuple[int, ...]
    tiers: tuple[TierName, ...] = (TierName.DEVICE,)  # those it has, degraded ones included


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress of the weights, sent before Ready."""

    done_bytes: int
    total_bytes: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine answers from now on."""

    info: EngineInfo


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start (bad folder, no room). It exits after this; starting it again would not help."""

    message: str


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """The step clock: sent at least every 0.25 s while the engine's loop turns, idle or busy."""

    steps: int
    waiting: int
    running: int


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """One token's natural-log probability before temperature and penalties."""

    token_id: int
    logprob: float


class Usage(msgspec.Struct, frozen=True):
    """Counts and times of a request; times in seconds from its arrival at the engine, prefill_s a duration."""

    prompt_tokens: int
    cached_device: int
    cached_host: int
    cached_disk: int
    queue_s: float
    prefill_s: float
    first_token_s: float
    lookup_s: float = 0.0  # the end of queue_s
    loads: tuple[Loaded, ...] = ()


class Started(msgspec.Struct, frozen=True, tag=True):
    """The prompt is computed; tokens follow."""

    request_id: str
    usage: Usage


class Token(msgspec.Struct, frozen=True, array_like=True):
    """A new token of choice `index`. `chosen` and `top` where logprobs were asked for."""

    request_id: str
    index: int
    token_id: int
    chosen: float | None = None
    top: tuple[Logprob, ...] = ()


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """A choice ended. `stop_token_id` is the id that ended it, where one did; that id was sent as its last Token."""

    request_id: str
    index: int
    reason: StopReason
    num_tokens: int
    stop_token_id: int | None = None


class StepOutput(msgspec.Struct, frozen=True, tag=True):
    """All that one step made, in order: tokens first, then the choices that ended."""

    tokens: tuple[Token, ...]
    finished: tuple[Finished, ...]


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """The whole request failed, a Submit or a Warm. Nothing of it is held any more."""

    request_id: str
    reason: ErrorReason
    message: str
    field: str = ""
    retry_after_s: float | None = None


class TierState(StrEnum):
    """What a tier still does."""

    OK = "ok"
    READ_ONLY = "read-only"  # serves what it has, takes nothing
    DEGRADED = "degraded"  # neither, until it has proven itself again


class TierRow(msgspec.Struct, frozen=True):
    """One tier's figures: held + cached + free = capacity, in bytes and in blocks. Counters since the engine's start.

    A read brings bytes from this tier to the device, a write brings them here; `read_s` / `reads` is the mean latency.
    """

    name: str
    medium: str
    capacity_bytes: int
    held_bytes: int
    cached_bytes: int
    free_bytes: int
    pinned_bytes: int
    hit_tokens: int
    miss_tokens: int
    evicted_blocks: int
    blocks: int
    free_blocks: int
    cached_blocks: int
    slots: int
    free_slots: int
    dirty_bytes: int = 0  # waiting to be written to this tier
    used_bytes: int = 0  # what the medium has given up for it; of a disk what du says
    quota_bytes: int | None = None  # the most that used_bytes may be; None: the capacity is all there is
    reads: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    writes: int = 0
    written_bytes: int = 0
    write_s: float = 0.0
    dropped_writes: int = 0  # given up at the bound of dirty bytes, or because the medium failed
    verify_failures: int = 0  # records that did not check
    quarantined: int = 0  # records set aside now
    gate_refusals: int = 0  # hits not loaded because computing was faster
    state: TierState = TierState.OK
    state_reason: str = ""  # in words where it is not ok
    is_unified: bool = False  # shares one physical memory with the tier before it, counted once
    driver_free_bytes: int | None = None  # device: what its driver says is free
    host_free_bytes: int | None = None  # what the system says is free, where that is the same memory


class TierEventKind(StrEnum):
    """What happened to a tier."""

    DEGRADED = "degraded"
    RECOVERED = "recovered"
    EVICTED = "evicted"  # a good part of it at once
    QUARANTINED = "quarantined"
    DROPPED = "dropped"  # writes were given up


class TierEvent(msgspec.Struct, frozen=True, tag=True):
    """Something that an operator may want to know of; sent when it has happened, at most four times a second."""

    kind: TierEventKind
    tier: TierName
    message: str
    count: int


class StreamRow(msgspec.Struct, frozen=True):
    """Where the blocks of a sequence larger than the device are. Rates are None before the first read."""

    device_blocks: int
    host_blocks: int
    disk_blocks: int
    streamed_bytes: int  # for the last token or chunk
    bytes_per_s: float | None  # at which rate
    link_bytes_per_s: float | None  # the best of late


class SequenceRow(msgspec.Struct, frozen=True):
    """One sequence as the engine sees it, a Warm's too.

    `state`: queued, restoring, prefilling, decoding or preempted.
    """

    request_id: str
    index: int
    state: str
    prompt_tokens: int
    completion_tokens: int
    computed_tokens: int
    cached_tokens: int
    blocks: int
    shared_blocks: int
    held_bytes: int
    age_s: float
    preemptions: int
    max_tokens: int
    namespace: str = ""
    stream: StreamRow | None = None  # None: all of it is resident


class LedgerRow(msgspec.Struct, frozen=True):
    """Bytes of one kind that one owner has in one tier."""

    tier: str
    kind: str
    owner: str
    bytes: int
    count: int


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The table a Query asked for; the other fields stay empty."""

    query_id: int
    tiers: tuple[TierRow, ...] = ()
    sequences: tuple[SequenceRow, ...] = ()
    ledger: tuple[LedgerRow, ...] = ()
    balanced: bool = True
    findings: tuple[str, ...] = ()
    meters: Meters | None = None


ToEngine = Configure | Submit | Abort | StopSequence | Query | Shutdown | CacheToEngine | KvToEngine
ToFront = (
    Loading | Ready | LoadFailed | Pulse | Started | StepOutput | Rejected | Answer | TierEvent
    | CacheToFront | KvToFront
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
to_front_decoder = msgspec.msgpack.Decoder(ToFront)


def encode(message: ToEngine | ToFront) -> bytes:
    """The message as it goes over the socket, length first.

    Raises:
        ValueError: it is larger than MAX_MESSAGE_BYTES.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"message of {len(body)} bytes, limit {MAX_MESSAGE_BYTES}")
    return HEADER.pack(len(body)) + body
