"""What front and engine say to each other about prefixes, tiers and quotas; daemon/messages.py has the rest.

Two kinds of talk. A Warm is a request: it shares its id space with Submit, is ended by Abort and may end as Rejected.
Everything else is a question: it carries a `query_id` and gets exactly one final answer with the same id, its own kind
or Refused. Verify alone sends progress before it.

Times that end in `_time_s` are Unix seconds; keys are 64 lower-case hexadecimal digits, the key of the prefix's last
block. Sizes are bytes as stored in that tier.
"""

from enum import StrEnum

import msgspec

from daemon.errors import ErrorReason

MAX_PREFIX_ROWS = 1000  # of one PrefixList
MAX_DAMAGE_ROWS = 1000  # of one VerifyDone


class TierName(StrEnum):
    """The levels of the cache, fastest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class BytesByTier(msgspec.Struct, frozen=True):
    """How many bytes lie where. A block in two tiers counts in both."""

    device: int = 0
    host: int = 0
    disk: int = 0


# Front to engine: warming


class Warm(msgspec.Struct, frozen=True, tag=True):
    """Compute what is missing of a prompt's prefix, and have all of it in `tier`. WarmProgress, then WarmDone.

    The prefix is the prompt up to its last position that can be shared: for N tokens the largest kG <= N in exact mode.
    The front sends no prompt that has none. `prompt_ids` is little-endian int32, as in Submit.

    With `pin` it stays until unpinned. `ttl_s` counts from the end of the job: a pin lapses after it; without a pin the
    prefix is forgotten after it. `durable` comes with `tier` disk alone: WarmDone is sent once records and index are
    synced. Abort ends it; what was computed until then stays as any prompt's would, without pin or time to live.
    Rejected: QUOTA_EXCEEDED, TIER_UNAVAILABLE, NO_CAPACITY, CONTEXT_TOO_LONG, QUEUE_FULL.
    """

    request_id: str
    prompt_ids: bytes
    namespace: str
    tier: TierName
    pin: bool
    durable: bool
    ttl_s: float | None = None


# Front to engine: questions


class Selector(msgspec.Struct, frozen=True):
    """One prefix of a namespace: by its key, or the deepest known prefix of a prompt. Exactly one of the two."""

    key: str | None = None
    prompt_ids: bytes | None = None


class Lookup(msgspec.Struct, frozen=True, tag=True):
    """What a Submit of this prompt would find now. Holds nothing, refreshes nothing. Answered by LookupAnswer."""

    query_id: int
    namespace: str
    prompt_ids: bytes


class PinPrefix(msgspec.Struct, frozen=True, tag=True):
    """Keeps a prefix and all before it from eviction; again: the new `ttl_s` replaces the old one. PrefixAnswer.

    Refused: NOT_FOUND, QUOTA_EXCEEDED.
    """

    query_id: int
    namespace: str
    prefix: Selector
    ttl_s: float | None = None


class UnpinPrefix(msgspec.Struct, frozen=True, tag=True):
    """Takes the pin back; of a prefix without one it changes nothing. PrefixAnswer. Refused: NOT_FOUND."""

    query_id: int
    namespace: str
    prefix: Selector


class EvictPrefix(msgspec.Struct, frozen=True, tag=True):
    """Forgets a prefix in every tier, with all that continues it; what other prefixes run through stays. Evicted.

    Refused: NOT_FOUND; PREFIX_PINNED where it or one that continues it is pinned.
    """

    query_id: int
    namespace: str
    prefix: Selector


class PrefixOrder(StrEnum):
    """What a list of prefixes begins with: the largest value of this."""

    RECENCY = "recency"  # last_use_time_s
    BYTES = "bytes"  # of all tiers
    HITS = "hits"


class ListPrefixes(msgspec.Struct, frozen=True, tag=True):
    """Prefixes of a namespace whose key begins with `key_prefix`, largest first, equal ones by key. PrefixList.

    At most `limit` (1 to MAX_PREFIX_ROWS), and only those that come after `after_value` and `after_key`, the value and
    key of an earlier page's last row, where given. Whoever asks for the next page finds it whatever has changed since.
    """

    query_id: int
    namespace: str
    key_prefix: str
    order: PrefixOrder
    limit: int
    after_value: float | None = None
    after_key: str = ""


class Flush(msgspec.Struct, frozen=True, tag=True):
    """Writes down all that this tier has and the tiers below lack, and syncs the disk. Forgets nothing. Flushed.

    Refused: TIER_UNAVAILABLE.
    """

    query_id: int
    tier: TierName


class Verify(msgspec.Struct, frozen=True, tag=True):
    """Reads every record of a tier and checks it; damaged ones are quarantined. VerifyProgress, then VerifyDone.

    Refused: TIER_UNAVAILABLE.
    """

    query_id: int
    tier: TierName


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for this question's answer any more. Ends a Verify or a Flush; ignored for all others. No answer."""

    query_id: int


class SetQuota(msgspec.Struct, frozen=True, tag=True):
    """The most that a namespace's prefixes may take, and its pinned ones, over all tiers. None: no limit. QuotaList.

    What is over a new quota is evicted; pins stay, and no new one is taken.
    """

    query_id: int
    namespace: str
    cached_bytes: int | None
    pinned_bytes: int | None


class RemoveQuota(msgspec.Struct, frozen=True, tag=True):
    """Lifts a namespace's quota. An empty QuotaList. Refused: NOT_FOUND."""

    query_id: int
    namespace: str


class ListQuotas(msgspec.Struct, frozen=True, tag=True):
    """Every namespace that has a quota or bytes in the cache, by name. QuotaList."""

    query_id: int


CacheToEngine = (
    Warm | Lookup | PinPrefix | UnpinPrefix | EvictPrefix | ListPrefixes
    | Flush | Verify | Cancel | SetQuota | RemoveQuota | ListQuotas
)  # fmt: skip


# Engine to front: warming


class WarmStage(StrEnum):
    """What a warm is at; `done_tokens` counts within its stage."""

    QUEUED = "queued"
    COMPUTING = "computing"  # or being read from a lower tier
    WRITING = "writing"  # to the wanted tier


class WarmProgress(msgspec.Struct, frozen=True, tag=True):
    """Sent when the stage changes and after each chunk."""

    request_id: str
    stage: WarmStage
    done_tokens: int
    total_tokens: int  # of the prefix


class WarmDone(msgspec.Struct, frozen=True, tag=True):
    """The receipt: what is so at this moment. Nothing of the request is held any more, but its pin.

    `durable`: every byte of the prefix is on disk and synced, whether asked for or not.
    """

    request_id: str
    key: str
    tokens: int
    cached_tokens: int  # of them were in some tier before
    bytes: BytesByTier
    durable: bool
    pinned: bool
    expires_time_s: float | None = None


# Engine to front: answers


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A question that has no answer, and why."""

    query_id: int
    reason: ErrorReason
    message: str
    field: str = ""
    retry_after_s: float | None = None


class LookupTier(msgspec.Struct, frozen=True):
    """What of the resumed prefix would come from this tier, each token counted in its fastest tier."""

    tier: TierName
    tokens: int
    bytes: int  # blocks and checkpoint to be loaded
    load_s: float  # at the bandwidth measured here; 0 for the device


class GateDecision(StrEnum):
    """Whether the prefix would be loaded."""

    NOTHING = "nothing"  # no prefix, or all of it is on the device
    LOAD = "load"
    COMPUTE = "compute"  # loading costs more


class LookupAnswer(msgspec.Struct, frozen=True, tag=True):
    """What a look-up found, and why it went no further.

    resume_tokens <= matched_tokens <= prompt_tokens. `compute_s` is for computing [0, resume_tokens), beside the sum of
    `load_s` over the tiers. `stop_reason` is an upper-case name for programs, `stop` the same in words.
    """

    query_id: int
    prompt_tokens: int
    matched_tokens: int  # by blocks, wherever they lie
    resume_tokens: int  # a Submit would compute from here
    key: str  # of the prefix up to resume_tokens; empty where that is 0
    tiers: tuple[LookupTier, ...]
    checkpoint_position: int | None  # None: the model keeps no state, or there is no checkpoint to use
    checkpoint_tier: TierName | None
    compute_s: float
    gate: GateDecision
    stop_reason: str
    stop: str


class PrefixRow(msgspec.Struct, frozen=True):
    """A prefix that a prompt can resume after: it ends at a checkpoint, or, without recurrent state, at a leaf.

    `tokens` counts from the beginning. `blocks`, `checkpoints` and `bytes` are those past `parent_key`, the next
    shorter prefix on its path, so that rows add up.
    """

    key: str
    parent_key: str  # empty: none
    namespace: str
    tokens: int
    blocks: int
    checkpoints: int
    bytes: BytesByTier
    pinned: bool
    last_use_time_s: float
    hits: int
    expires_time_s: float | None = None  # of the pin where it is pinned, else of the prefix


class PrefixAnswer(msgspec.Struct, frozen=True, tag=True):
    """The prefix as it is after PinPrefix or UnpinPrefix."""

    query_id: int
    prefix: PrefixRow


class Evicted(msgspec.Struct, frozen=True, tag=True):
    """What is gone. `kept_blocks` on its path stay: another prefix runs through them, or a sequence holds them."""

    query_id: int
    prefixes: int
    blocks: int
    checkpoints: int
    kept_blocks: int
    bytes: BytesByTier


class PrefixList(msgspec.Struct, frozen=True, tag=True):
    """One page. `total` prefixes match in all; `more`: some come after the last row."""

    query_id: int
    rows: tuple[PrefixRow, ...]
    total: int
    more: bool


class Flushed(msgspec.Struct, frozen=True, tag=True):
    """All is written that could be. `durable`: every prefix is, and synced, so that it survives a power cut."""

    query_id: int
    records: int
    bytes: int
    seconds: float
    durable: bool


class VerifyProgress(msgspec.Struct, frozen=True, tag=True):
    """How far a Verify is."""

    query_id: int
    done_records: int
    total_records: int
    done_bytes: int
    total_bytes: int


class Damage(msgspec.Struct, frozen=True):
    """A damaged record: where it lies (segment and offset, never a path), its key, and what is wrong in words."""

    name: str
    key: str
    what: str
    bytes: int


class VerifyDone(msgspec.Struct, frozen=True, tag=True):
    """Everything was read. At most MAX_DAMAGE_ROWS of `damaged` records are told by name."""

    query_id: int
    records: int
    bytes: int
    seconds: float
    damaged: int
    damage: tuple[Damage, ...]


class QuotaRow(msgspec.Struct, frozen=True):
    """A namespace's limits and use. None: no limit. `durable`: the quota survives a restart of the daemon."""

    namespace: str
    cached_bytes: int | None
    pinned_bytes: int | None
    used_cached_bytes: int
    used_pinned_bytes: int
    durable: bool


class QuotaList(msgspec.Struct, frozen=True, tag=True):
    """The namespaces asked about."""

    query_id: int
    rows: tuple[QuotaRow, ...]


CacheAnswer = (
    Refused | LookupAnswer | PrefixAnswer | Evicted | PrefixList | Flushed | VerifyProgress | VerifyDone | QuotaList
)  # fmt: skip
CacheToFront = WarmProgress | WarmDone | CacheAnswer
