from downcore.v1 import cache_pb2 as _cache_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STATE_UNSPECIFIED: _ClassVar[EngineState]
    ENGINE_STATE_LOADING: _ClassVar[EngineState]
    ENGINE_STATE_SERVING: _ClassVar[EngineState]
    ENGINE_STATE_DRAINING: _ClassVar[EngineState]
    ENGINE_STATE_DOWN: _ClassVar[EngineState]

class TierState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_STATE_UNSPECIFIED: _ClassVar[TierState]
    TIER_STATE_OK: _ClassVar[TierState]
    TIER_STATE_READ_ONLY: _ClassVar[TierState]
    TIER_STATE_DEGRADED: _ClassVar[TierState]

class SequenceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEQUENCE_STATE_UNSPECIFIED: _ClassVar[SequenceState]
    SEQUENCE_STATE_QUEUED: _ClassVar[SequenceState]
    SEQUENCE_STATE_PREFILLING: _ClassVar[SequenceState]
    SEQUENCE_STATE_DECODING: _ClassVar[SequenceState]
    SEQUENCE_STATE_PREEMPTED: _ClassVar[SequenceState]
    SEQUENCE_STATE_RESTORING: _ClassVar[SequenceState]

class EventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_KIND_UNSPECIFIED: _ClassVar[EventKind]
    EVENT_KIND_ENGINE_STARTED: _ClassVar[EventKind]
    EVENT_KIND_ENGINE_READY: _ClassVar[EventKind]
    EVENT_KIND_ENGINE_GONE: _ClassVar[EventKind]
    EVENT_KIND_SERVING: _ClassVar[EventKind]
    EVENT_KIND_NOT_SERVING: _ClassVar[EventKind]
    EVENT_KIND_DRAINING: _ClassVar[EventKind]
    EVENT_KIND_DRAINED: _ClassVar[EventKind]
    EVENT_KIND_REQUESTS_ENDED: _ClassVar[EventKind]
    EVENT_KIND_REQUESTS_SHED: _ClassVar[EventKind]
    EVENT_KIND_TIER_DEGRADED: _ClassVar[EventKind]
    EVENT_KIND_TIER_RECOVERED: _ClassVar[EventKind]
    EVENT_KIND_TIER_EVICTED: _ClassVar[EventKind]
    EVENT_KIND_TIER_QUARANTINED: _ClassVar[EventKind]
    EVENT_KIND_TIER_DROPPED: _ClassVar[EventKind]
    EVENT_KIND_RELOADED: _ClassVar[EventKind]
ENGINE_STATE_UNSPECIFIED: EngineState
ENGINE_STATE_LOADING: EngineState
ENGINE_STATE_SERVING: EngineState
ENGINE_STATE_DRAINING: EngineState
ENGINE_STATE_DOWN: EngineState
TIER_STATE_UNSPECIFIED: TierState
TIER_STATE_OK: TierState
TIER_STATE_READ_ONLY: TierState
TIER_STATE_DEGRADED: TierState
SEQUENCE_STATE_UNSPECIFIED: SequenceState
SEQUENCE_STATE_QUEUED: SequenceState
SEQUENCE_STATE_PREFILLING: SequenceState
SEQUENCE_STATE_DECODING: SequenceState
SEQUENCE_STATE_PREEMPTED: SequenceState
SEQUENCE_STATE_RESTORING: SequenceState
EVENT_KIND_UNSPECIFIED: EventKind
EVENT_KIND_ENGINE_STARTED: EventKind
EVENT_KIND_ENGINE_READY: EventKind
EVENT_KIND_ENGINE_GONE: EventKind
EVENT_KIND_SERVING: EventKind
EVENT_KIND_NOT_SERVING: EventKind
EVENT_KIND_DRAINING: EventKind
EVENT_KIND_DRAINED: EventKind
EVENT_KIND_REQUESTS_ENDED: EventKind
EVENT_KIND_REQUESTS_SHED: EventKind
EVENT_KIND_TIER_DEGRADED: EventKind
EVENT_KIND_TIER_RECOVERED: EventKind
EVENT_KIND_TIER_EVICTED: EventKind
EVENT_KIND_TIER_QUARANTINED: EventKind
EVENT_KIND_TIER_DROPPED: EventKind
EVENT_KIND_RELOADED: EventKind

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "model", "family", "parameters", "dtype", "device", "max_context_tokens", "block_size", "grid", "state_fingerprint", "numerics_profile", "state", "engine_pid", "engine_starts", "steps", "uptime_s", "vocab_size", "bytes_per_token", "slot_bytes", "loaded", "tiers", "answer_tokens", "prompt_tokens", "cached_tokens")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    STATE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_PROFILE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_PID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_STARTS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    family: str
    parameters: int
    dtype: str
    device: str
    max_context_tokens: int
    block_size: int
    grid: int
    state_fingerprint: str
    numerics_profile: str
    state: EngineState
    engine_pid: int
    engine_starts: int
    steps: int
    uptime_s: float
    vocab_size: int
    bytes_per_token: int
    slot_bytes: int
    loaded: float
    tiers: _containers.RepeatedScalarFieldContainer[_cache_pb2.CacheTier]
    answer_tokens: int
    prompt_tokens: int
    cached_tokens: int
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., family: _Optional[str] = ..., parameters: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., block_size: _Optional[int] = ..., grid: _Optional[int] = ..., state_fingerprint: _Optional[str] = ..., numerics_profile: _Optional[str] = ..., state: _Optional[_Union[EngineState, str]] = ..., engine_pid: _Optional[int] = ..., engine_starts: _Optional[int] = ..., steps: _Optional[int] = ..., uptime_s: _Optional[float] = ..., vocab_size: _Optional[int] = ..., bytes_per_token: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., loaded: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[_cache_pb2.CacheTier, str]]] = ..., answer_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class ListTiersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Tier(_message.Message):
    __slots__ = ("name", "medium", "capacity_bytes", "held_bytes", "cached_bytes", "free_bytes", "pinned_bytes", "hit_tokens", "miss_tokens", "evicted_blocks", "blocks", "free_blocks", "cached_blocks", "slots", "free_slots", "dirty_bytes", "used_bytes", "quota_bytes", "reads", "read_bytes", "read_s", "writes", "written_bytes", "write_s", "dropped_writes", "verify_failures", "quarantined", "gate_refusals", "state", "state_reason", "is_unified", "driver_free_bytes", "host_free_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    DIRTY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_S_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITE_S_FIELD_NUMBER: _ClassVar[int]
    DROPPED_WRITES_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FAILURES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    GATE_REFUSALS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STATE_REASON_FIELD_NUMBER: _ClassVar[int]
    IS_UNIFIED_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
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
    dirty_bytes: int
    used_bytes: int
    quota_bytes: int
    reads: int
    read_bytes: int
    read_s: float
    writes: int
    written_bytes: int
    write_s: float
    dropped_writes: int
    verify_failures: int
    quarantined: int
    gate_refusals: int
    state: TierState
    state_reason: str
    is_unified: bool
    driver_free_bytes: int
    host_free_bytes: int
    def __init__(self, name: _Optional[str] = ..., medium: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., held_bytes: _Optional[int] = ..., cached_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., miss_tokens: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., slots: _Optional[int] = ..., free_slots: _Optional[int] = ..., dirty_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., quota_bytes: _Optional[int] = ..., reads: _Optional[int] = ..., read_bytes: _Optional[int] = ..., read_s: _Optional[float] = ..., writes: _Optional[int] = ..., written_bytes: _Optional[int] = ..., write_s: _Optional[float] = ..., dropped_writes: _Optional[int] = ..., verify_failures: _Optional[int] = ..., quarantined: _Optional[int] = ..., gate_refusals: _Optional[int] = ..., state: _Optional[_Union[TierState, str]] = ..., state_reason: _Optional[str] = ..., is_unified: _Optional[bool] = ..., driver_free_bytes: _Optional[int] = ..., host_free_bytes: _Optional[int] = ...) -> None: ...

class ListTiersResponse(_message.Message):
    __slots__ = ("tiers",)
    TIERS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[Tier]
    def __init__(self, tiers: _Optional[_Iterable[_Union[Tier, _Mapping]]] = ...) -> None: ...

class WatchTiersRequest(_message.Message):
    __slots__ = ("interval_s",)
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    interval_s: float
    def __init__(self, interval_s: _Optional[float] = ...) -> None: ...

class WatchTiersResponse(_message.Message):
    __slots__ = ("tiers", "time_s")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[Tier]
    time_s: float
    def __init__(self, tiers: _Optional[_Iterable[_Union[Tier, _Mapping]]] = ..., time_s: _Optional[float] = ...) -> None: ...

class ListSequencesRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class Sequence(_message.Message):
    __slots__ = ("id", "request_id", "index", "state", "prompt_tokens", "completion_tokens", "computed_tokens", "cached_tokens", "blocks", "shared_blocks", "held_bytes", "age_s", "preemptions", "max_tokens", "is_warming", "namespace", "residency")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_WARMING_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    id: str
    request_id: str
    index: int
    state: SequenceState
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
    is_warming: bool
    namespace: str
    residency: Residency
    def __init__(self, id: _Optional[str] = ..., request_id: _Optional[str] = ..., index: _Optional[int] = ..., state: _Optional[_Union[SequenceState, str]] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., shared_blocks: _Optional[int] = ..., held_bytes: _Optional[int] = ..., age_s: _Optional[float] = ..., preemptions: _Optional[int] = ..., max_tokens: _Optional[int] = ..., is_warming: _Optional[bool] = ..., namespace: _Optional[str] = ..., residency: _Optional[_Union[Residency, _Mapping]] = ...) -> None: ...

class Residency(_message.Message):
    __slots__ = ("device_blocks", "host_blocks", "disk_blocks", "streamed_bytes", "streamed_bytes_per_s", "link_bytes_per_s")
    DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STREAMED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STREAMED_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    device_blocks: int
    host_blocks: int
    disk_blocks: int
    streamed_bytes: int
    streamed_bytes_per_s: float
    link_bytes_per_s: float
    def __init__(self, device_blocks: _Optional[int] = ..., host_blocks: _Optional[int] = ..., disk_blocks: _Optional[int] = ..., streamed_bytes: _Optional[int] = ..., streamed_bytes_per_s: _Optional[float] = ..., link_bytes_per_s: _Optional[float] = ...) -> None: ...

class ListSequencesResponse(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[Sequence]
    def __init__(self, sequences: _Optional[_Iterable[_Union[Sequence, _Mapping]]] = ...) -> None: ...

class GetLedgerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LedgerEntry(_message.Message):
    __slots__ = ("tier", "kind", "owner", "bytes", "count")
    TIER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    tier: str
    kind: str
    owner: str
    bytes: int
    count: int
    def __init__(self, tier: _Optional[str] = ..., kind: _Optional[str] = ..., owner: _Optional[str] = ..., bytes: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class GetLedgerResponse(_message.Message):
    __slots__ = ("entries", "balanced", "findings")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    BALANCED_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[LedgerEntry]
    balanced: bool
    findings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, entries: _Optional[_Iterable[_Union[LedgerEntry, _Mapping]]] = ..., balanced: _Optional[bool] = ..., findings: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortSequenceRequest(_message.Message):
    __slots__ = ("id", "namespace")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    id: str
    namespace: str
    def __init__(self, id: _Optional[str] = ..., namespace: _Optional[str] = ...) -> None: ...

class AbortSequenceResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: int
    def __init__(self, aborted: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("drained", "open_requests")
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    drained: bool
    open_requests: int
    def __init__(self, drained: _Optional[bool] = ..., open_requests: _Optional[int] = ...) -> None: ...

class FlushTierRequest(_message.Message):
    __slots__ = ("tier",)
    TIER_FIELD_NUMBER: _ClassVar[int]
    tier: _cache_pb2.CacheTier
    def __init__(self, tier: _Optional[_Union[_cache_pb2.CacheTier, str]] = ...) -> None: ...

class FlushTierResponse(_message.Message):
    __slots__ = ("records", "bytes", "seconds", "durable")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    records: int
    bytes: int
    seconds: float
    durable: bool
    def __init__(self, records: _Optional[int] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., durable: _Optional[bool] = ...) -> None: ...

class VerifyTierRequest(_message.Message):
    __slots__ = ("tier",)
    TIER_FIELD_NUMBER: _ClassVar[int]
    tier: _cache_pb2.CacheTier
    def __init__(self, tier: _Optional[_Union[_cache_pb2.CacheTier, str]] = ...) -> None: ...

class VerifyProgress(_message.Message):
    __slots__ = ("done_records", "total_records", "done_bytes", "total_bytes")
    DONE_RECORDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_RECORDS_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    done_records: int
    total_records: int
    done_bytes: int
    total_bytes: int
    def __init__(self, done_records: _Optional[int] = ..., total_records: _Optional[int] = ..., done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class DamagedRecord(_message.Message):
    __slots__ = ("name", "key", "what", "bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    key: str
    what: str
    bytes: int
    def __init__(self, name: _Optional[str] = ..., key: _Optional[str] = ..., what: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class VerifyReport(_message.Message):
    __slots__ = ("records", "bytes", "seconds", "damaged", "damage")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    DAMAGE_FIELD_NUMBER: _ClassVar[int]
    records: int
    bytes: int
    seconds: float
    damaged: int
    damage: _containers.RepeatedCompositeFieldContainer[DamagedRecord]
    def __init__(self, records: _Optional[int] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., damaged: _Optional[int] = ..., damage: _Optional[_Iterable[_Union[DamagedRecord, _Mapping]]] = ...) -> None: ...

class VerifyTierResponse(_message.Message):
    __slots__ = ("progress", "report")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    progress: VerifyProgress
    report: VerifyReport
    def __init__(self, progress: _Optional[_Union[VerifyProgress, _Mapping]] = ..., report: _Optional[_Union[VerifyReport, _Mapping]] = ...) -> None: ...

class Quota(_message.Message):
    __slots__ = ("namespace", "cached_bytes", "pinned_bytes", "used_cached_bytes", "used_pinned_bytes", "durable")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CACHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_CACHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    cached_bytes: int
    pinned_bytes: int
    used_cached_bytes: int
    used_pinned_bytes: int
    durable: bool
    def __init__(self, namespace: _Optional[str] = ..., cached_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., used_cached_bytes: _Optional[int] = ..., used_pinned_bytes: _Optional[int] = ..., durable: _Optional[bool] = ...) -> None: ...

class SetQuotaRequest(_message.Message):
    __slots__ = ("namespace", "cached_bytes", "pinned_bytes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CACHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    cached_bytes: int
    pinned_bytes: int
    def __init__(self, namespace: _Optional[str] = ..., cached_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ...) -> None: ...

class SetQuotaResponse(_message.Message):
    __slots__ = ("quota",)
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    quota: Quota
    def __init__(self, quota: _Optional[_Union[Quota, _Mapping]] = ...) -> None: ...

class ListQuotasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListQuotasResponse(_message.Message):
    __slots__ = ("quotas",)
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    quotas: _containers.RepeatedCompositeFieldContainer[Quota]
    def __init__(self, quotas: _Optional[_Iterable[_Union[Quota, _Mapping]]] = ...) -> None: ...

class RemoveQuotaRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    def __init__(self, namespace: _Optional[str] = ...) -> None: ...

class RemoveQuotaResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Event(_message.Message):
    __slots__ = ("sequence", "time_s", "kind", "message", "tier", "count")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    time_s: float
    kind: EventKind
    message: str
    tier: str
    count: int
    def __init__(self, sequence: _Optional[int] = ..., time_s: _Optional[float] = ..., kind: _Optional[_Union[EventKind, str]] = ..., message: _Optional[str] = ..., tier: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("after_sequence", "log_id", "follow", "kinds")
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    after_sequence: int
    log_id: str
    follow: bool
    kinds: _containers.RepeatedScalarFieldContainer[EventKind]
    def __init__(self, after_sequence: _Optional[int] = ..., log_id: _Optional[str] = ..., follow: _Optional[bool] = ..., kinds: _Optional[_Iterable[_Union[EventKind, str]]] = ...) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("event", "log_id", "missed")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    event: Event
    log_id: str
    missed: int
    def __init__(self, event: _Optional[_Union[Event, _Mapping]] = ..., log_id: _Optional[str] = ..., missed: _Optional[int] = ...) -> None: ...
