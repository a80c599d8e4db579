from downcore.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CacheTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_TIER_UNSPECIFIED: _ClassVar[CacheTier]
    CACHE_TIER_DEVICE: _ClassVar[CacheTier]
    CACHE_TIER_HOST: _ClassVar[CacheTier]
    CACHE_TIER_DISK: _ClassVar[CacheTier]

class WarmStage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WARM_STAGE_UNSPECIFIED: _ClassVar[WarmStage]
    WARM_STAGE_QUEUED: _ClassVar[WarmStage]
    WARM_STAGE_COMPUTING: _ClassVar[WarmStage]
    WARM_STAGE_WRITING: _ClassVar[WarmStage]
    WARM_STAGE_DONE: _ClassVar[WarmStage]

class GateDecision(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GATE_DECISION_UNSPECIFIED: _ClassVar[GateDecision]
    GATE_DECISION_NOTHING: _ClassVar[GateDecision]
    GATE_DECISION_LOAD: _ClassVar[GateDecision]
    GATE_DECISION_COMPUTE: _ClassVar[GateDecision]

class PrefixOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREFIX_ORDER_UNSPECIFIED: _ClassVar[PrefixOrder]
    PREFIX_ORDER_RECENCY: _ClassVar[PrefixOrder]
    PREFIX_ORDER_BYTES: _ClassVar[PrefixOrder]
    PREFIX_ORDER_HITS: _ClassVar[PrefixOrder]
CACHE_TIER_UNSPECIFIED: CacheTier
CACHE_TIER_DEVICE: CacheTier
CACHE_TIER_HOST: CacheTier
CACHE_TIER_DISK: CacheTier
WARM_STAGE_UNSPECIFIED: WarmStage
WARM_STAGE_QUEUED: WarmStage
WARM_STAGE_COMPUTING: WarmStage
WARM_STAGE_WRITING: WarmStage
WARM_STAGE_DONE: WarmStage
GATE_DECISION_UNSPECIFIED: GateDecision
GATE_DECISION_NOTHING: GateDecision
GATE_DECISION_LOAD: GateDecision
GATE_DECISION_COMPUTE: GateDecision
PREFIX_ORDER_UNSPECIFIED: PrefixOrder
PREFIX_ORDER_RECENCY: PrefixOrder
PREFIX_ORDER_BYTES: PrefixOrder
PREFIX_ORDER_HITS: PrefixOrder

class BytesByTier(_message.Message):
    __slots__ = ("device", "host", "disk")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    device: int
    host: int
    disk: int
    def __init__(self, device: _Optional[int] = ..., host: _Optional[int] = ..., disk: _Optional[int] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("text", "token_ids", "chat")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _generation_pb2.TokenIds
    chat: _generation_pb2.Chat
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[_generation_pb2.TokenIds, _Mapping]] = ..., chat: _Optional[_Union[_generation_pb2.Chat, _Mapping]] = ...) -> None: ...

class PrefixSelector(_message.Message):
    __slots__ = ("key", "prompt")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    key: str
    prompt: Prompt
    def __init__(self, key: _Optional[str] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ...) -> None: ...

class Prefix(_message.Message):
    __slots__ = ("key", "parent_key", "namespace", "tokens", "blocks", "checkpoints", "bytes", "pinned", "expires_time_s", "last_use_time_s", "hits")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_KEY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_TIME_S_FIELD_NUMBER: _ClassVar[int]
    LAST_USE_TIME_S_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    key: str
    parent_key: str
    namespace: str
    tokens: int
    blocks: int
    checkpoints: int
    bytes: BytesByTier
    pinned: bool
    expires_time_s: float
    last_use_time_s: float
    hits: int
    def __init__(self, key: _Optional[str] = ..., parent_key: _Optional[str] = ..., namespace: _Optional[str] = ..., tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., checkpoints: _Optional[int] = ..., bytes: _Optional[_Union[BytesByTier, _Mapping]] = ..., pinned: _Optional[bool] = ..., expires_time_s: _Optional[float] = ..., last_use_time_s: _Optional[float] = ..., hits: _Optional[int] = ...) -> None: ...

class WarmPrefixRequest(_message.Message):
    __slots__ = ("key", "prompts", "tier", "ttl_s", "pin", "durable", "detached", "namespace")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    key: str
    prompts: _containers.RepeatedCompositeFieldContainer[Prompt]
    tier: CacheTier
    ttl_s: float
    pin: bool
    durable: bool
    detached: bool
    namespace: str
    def __init__(self, key: _Optional[str] = ..., prompts: _Optional[_Iterable[_Union[Prompt, _Mapping]]] = ..., tier: _Optional[_Union[CacheTier, str]] = ..., ttl_s: _Optional[float] = ..., pin: _Optional[bool] = ..., durable: _Optional[bool] = ..., detached: _Optional[bool] = ..., namespace: _Optional[str] = ...) -> None: ...

class WarmStarted(_message.Message):
    __slots__ = ("key", "prompt_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: str
    prompt_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[str] = ..., prompt_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class WarmProgress(_message.Message):
    __slots__ = ("prompt_index", "stage", "done_tokens", "total_tokens")
    PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DONE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_index: int
    stage: WarmStage
    done_tokens: int
    total_tokens: int
    def __init__(self, prompt_index: _Optional[int] = ..., stage: _Optional[_Union[WarmStage, str]] = ..., done_tokens: _Optional[int] = ..., total_tokens: _Optional[int] = ...) -> None: ...

class WarmedPrefix(_message.Message):
    __slots__ = ("key", "tokens", "cached_tokens", "bytes", "durable", "pinned", "expires_time_s")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_TIME_S_FIELD_NUMBER: _ClassVar[int]
    key: str
    tokens: int
    cached_tokens: int
    bytes: BytesByTier
    durable: bool
    pinned: bool
    expires_time_s: float
    def __init__(self, key: _Optional[str] = ..., tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., bytes: _Optional[_Union[BytesByTier, _Mapping]] = ..., durable: _Optional[bool] = ..., pinned: _Optional[bool] = ..., expires_time_s: _Optional[float] = ...) -> None: ...

class WarmReceipt(_message.Message):
    __slots__ = ("key", "prefixes", "time_s", "is_repeated")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    IS_REPEATED_FIELD_NUMBER: _ClassVar[int]
    key: str
    prefixes: _containers.RepeatedCompositeFieldContainer[WarmedPrefix]
    time_s: float
    is_repeated: bool
    def __init__(self, key: _Optional[str] = ..., prefixes: _Optional[_Iterable[_Union[WarmedPrefix, _Mapping]]] = ..., time_s: _Optional[float] = ..., is_repeated: _Optional[bool] = ...) -> None: ...

class WarmPrefixResponse(_message.Message):
    __slots__ = ("started", "progress", "receipt")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    started: WarmStarted
    progress: WarmProgress
    receipt: WarmReceipt
    def __init__(self, started: _Optional[_Union[WarmStarted, _Mapping]] = ..., progress: _Optional[_Union[WarmProgress, _Mapping]] = ..., receipt: _Optional[_Union[WarmReceipt, _Mapping]] = ...) -> None: ...

class LookupPrefixRequest(_message.Message):
    __slots__ = ("prompt", "namespace")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    namespace: str
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., namespace: _Optional[str] = ...) -> None: ...

class LookupTier(_message.Message):
    __slots__ = ("tier", "tokens", "bytes", "load_s")
    TIER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    tier: CacheTier
    tokens: int
    bytes: int
    load_s: float
    def __init__(self, tier: _Optional[_Union[CacheTier, str]] = ..., tokens: _Optional[int] = ..., bytes: _Optional[int] = ..., load_s: _Optional[float] = ...) -> None: ...

class CheckpointPlace(_message.Message):
    __slots__ = ("position", "tier")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    position: int
    tier: CacheTier
    def __init__(self, position: _Optional[int] = ..., tier: _Optional[_Union[CacheTier, str]] = ...) -> None: ...

class LookupPrefixResponse(_message.Message):
    __slots__ = ("prompt_tokens", "matched_tokens", "resume_tokens", "key", "tiers", "checkpoint", "load_s", "compute_s", "gate", "stop_reason", "stop")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    matched_tokens: int
    resume_tokens: int
    key: str
    tiers: _containers.RepeatedCompositeFieldContainer[LookupTier]
    checkpoint: CheckpointPlace
    load_s: float
    compute_s: float
    gate: GateDecision
    stop_reason: str
    stop: str
    def __init__(self, prompt_tokens: _Optional[int] = ..., matched_tokens: _Optional[int] = ..., resume_tokens: _Optional[int] = ..., key: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[LookupTier, _Mapping]]] = ..., checkpoint: _Optional[_Union[CheckpointPlace, _Mapping]] = ..., load_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., gate: _Optional[_Union[GateDecision, str]] = ..., stop_reason: _Optional[str] = ..., stop: _Optional[str] = ...) -> None: ...

class PinPrefixRequest(_message.Message):
    __slots__ = ("prefix", "ttl_s", "namespace")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    prefix: PrefixSelector
    ttl_s: float
    namespace: str
    def __init__(self, prefix: _Optional[_Union[PrefixSelector, _Mapping]] = ..., ttl_s: _Optional[float] = ..., namespace: _Optional[str] = ...) -> None: ...

class PinPrefixResponse(_message.Message):
    __slots__ = ("prefix",)
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    prefix: Prefix
    def __init__(self, prefix: _Optional[_Union[Prefix, _Mapping]] = ...) -> None: ...

class UnpinPrefixRequest(_message.Message):
    __slots__ = ("prefix", "namespace")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    prefix: PrefixSelector
    namespace: str
    def __init__(self, prefix: _Optional[_Union[PrefixSelector, _Mapping]] = ..., namespace: _Optional[str] = ...) -> None: ...

class UnpinPrefixResponse(_message.Message):
    __slots__ = ("prefix",)
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    prefix: Prefix
    def __init__(self, prefix: _Optional[_Union[Prefix, _Mapping]] = ...) -> None: ...

class EvictPrefixRequest(_message.Message):
    __slots__ = ("prefix", "namespace")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    prefix: PrefixSelector
    namespace: str
    def __init__(self, prefix: _Optional[_Union[PrefixSelector, _Mapping]] = ..., namespace: _Optional[str] = ...) -> None: ...

class EvictPrefixResponse(_message.Message):
    __slots__ = ("prefixes", "blocks", "checkpoints", "kept_blocks", "bytes")
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    KEPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    prefixes: int
    blocks: int
    checkpoints: int
    kept_blocks: int
    bytes: BytesByTier
    def __init__(self, prefixes: _Optional[int] = ..., blocks: _Optional[int] = ..., checkpoints: _Optional[int] = ..., kept_blocks: _Optional[int] = ..., bytes: _Optional[_Union[BytesByTier, _Mapping]] = ...) -> None: ...

class ListPrefixesRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "key_prefix", "order", "namespace")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KEY_PREFIX_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    key_prefix: str
    order: PrefixOrder
    namespace: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., key_prefix: _Optional[str] = ..., order: _Optional[_Union[PrefixOrder, str]] = ..., namespace: _Optional[str] = ...) -> None: ...

class ListPrefixesResponse(_message.Message):
    __slots__ = ("prefixes", "next_page_token", "total")
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    prefixes: _containers.RepeatedCompositeFieldContainer[Prefix]
    next_page_token: str
    total: int
    def __init__(self, prefixes: _Optional[_Iterable[_Union[Prefix, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., total: _Optional[int] = ...) -> None: ...
