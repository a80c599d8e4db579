"""Every field of every request is checked here, by one table, before anything is allocated for it.

A rule names a field, reads it, and says what is wrong with its value. Rules are tried in order and the first complaint
is the answer: INVALID_ARGUMENT, or RESOURCE_EXHAUSTED where the value is one that a larger server would take.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from downcore.v1 import admin_pb2, cache_pb2
from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message

from daemon.cache_messages import MAX_PREFIX_ROWS
from daemon.errors import ErrorReason, RequestError
from daemon.front.config import MAX_DRAIN_S
from daemon.front.principals import is_namespace

MAX_N = 8
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_STOP_IDS = 64
MAX_BIASES = 1024
MAX_STRUCTURE_BYTES = 64 << 10
MAX_CHOICES = 1024
MAX_CHAT_MESSAGES = 4096
MAX_ROLE_BYTES = 64
MAX_WARM_PROMPTS = 64
MAX_TTL_S = 10 * 365 * 86_400.0
MAX_QUOTA_BYTES = 1 << 50
MAX_EVENT_KINDS = 64
MIN_WATCH_S = 0.1
MAX_WATCH_S = 3600.0
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_KEY = re.compile(r"[0-9a-f]{64}")
_PAGE_TOKEN = re.compile(r"[A-Za-z0-9_=-]{0,1024}")
_KEY_PREFIX = re.compile(r"[0-9a-f]{0,64}")
_LOG_ID = re.compile(r"[0-9a-f]{0,64}")
_SEQUENCE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}(/[0-9]{1,2})?")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the rules need to know of this server and its model."""

    vocab_size: int
    max_context_tokens: int
    max_answer_tokens: int  # the server's own limit on max_tokens
    max_prompt_bytes: int


Complaint = str | None


@dataclass(frozen=True, slots=True)
class Rule:
    """`read` gives the field's value, or None where it is absent and its default stands. `complain` judges it."""

    field: str
    read: Callable[[Any], Any]
    complain: Callable[[Any, Limits], Complaint]
    reason: ErrorReason = ErrorReason.INVALID_ARGUMENT


def check(request: Message, rules: Sequence[Rule], limits: Limits, within: str = "") -> None:
    """Raises RequestError for the first rule that has something against the request.

    Args:
        within: the dotted name of the field that holds it, where it is part of a larger request.
    """
    for rule in rules:
        value = rule.read(request)
        if value is None:
            continue
        complaint = rule.complain(value, limits)
        if complaint is not None:
            raise RequestError(rule.reason, complaint, field=dotted(within, rule.field))


def dotted(outer: str, inner: str) -> str:
    """The name of a field within another."""
    return f"{outer}.{inner}" if outer and inner else outer or inner


def _real(low: float, high: float, *, above_low: bool = False) -> Callable[[Any, Limits], Complaint]:
    bounds = f"must be {'above' if above_low else 'from'} {low:g} {'and at most' if above_low else 'to'} {high:g}"

    def complain(value: float, limits: Limits) -> Complaint:
        if not math.isfinite(value):
            return f"{bounds}, not {value}"
        if value > high or value < low or (above_low and value == low):
            return f"{bounds}, not {value:g}"
        return None

    return complain


def _whole(low: int, high: int) -> Callable[[Any, Limits], Complaint]:
    def complain(value: int, limits: Limits) -> Complaint:
        return None if low <= value <= high else f"must be from {low} to {high}, not {value}"

    return complain


def _matches(pattern: re.Pattern[str]) -> Callable[[Any, Limits], Complaint]:
    def complain(value: str, limits: Limits) -> Complaint:
        return None if pattern.fullmatch(value) else f"must match {pattern.pattern}"

    return complain


def _member(enum: EnumDescriptor, *, given: bool = False) -> Callable[[Any, Limits], Complaint]:
    """A value that the enum names; 0 is its "unspecified", and no value where one must be given."""
    names = ", ".join(value.name for value in enum.values if value.number or not given)

    def complain(value: int, limits: Limits) -> Complaint:
        known = value in enum.values_by_number and (value != 0 or not given)
        return None if known else f"must be one of {names}"

    return complain


def _at_most(count: int) -> Callable[[Any, Limits], Complaint]:
    def complain(value: Collection[object], limits: Limits) -> Complaint:
        return None if len(value) <= count else f"has {len(value)} entries, at most {count} are allowed"

    return complain


def _known_tokens(value: Iterable[int], limits: Limits) -> Complaint:
    top = max(value, default=0)
    return None if top < limits.vocab_size else f"token id {top} is unknown; the vocabulary has {limits.vocab_size}"


def _not_empty(value: Collection[object], limits: Limits) -> Complaint:
    return None if value else "must not be empty"


def _bytes_fit(num_chars: int, parts: Iterable[str], limits: Limits) -> Complaint:
    # A character is at least one byte, so the cheap count comes first and nothing large is encoded.
    limit = limits.max_prompt_bytes
    if num_chars > limit or sum(len(part.encode()) for part in parts) > limit:
        return f"is larger than {limit} bytes"
    return None


def _text_fits(value: str, limits: Limits) -> Complaint:
    return _bytes_fit(len(value), (value,), limits)


def _chat_fits(value: Sequence[Any], limits: Limits) -> Complaint:
    num_chars = sum(len(message.content) for message in value)
    return _bytes_fit(num_chars, (message.content for message in value), limits)


def _roles(value: Sequence[Any], limits: Limits) -> Complaint:
    for i, message in enumerate(value):
        if not 0 < len(message.role.encode()) <= MAX_ROLE_BYTES:
            return f"message {i} has a role of {len(message.role.encode())} bytes, 1 to {MAX_ROLE_BYTES} are allowed"
    return None


def _ids_fit(value: Sequence[int], limits: Limits) -> Complaint:
    longest = limits.max_context_tokens - 1
    return None if len(value) <= longest else f"has {len(value)} tokens; the context takes {longest} and an answer"


def _biases(value: dict[int, float], limits: Limits) -> Complaint:
    for token_id, bias in value.items():
        if token_id >= limits.vocab_size:
            return _known_tokens((token_id,), limits)
        if not -100 <= bias <= 100:  # NaN is not either
            return f"of token {token_id} must be from -100 to 100, not {bias:g}"
    return None


def _stop_sizes(value: Sequence[str], limits: Limits) -> Complaint:
    for i, stop in enumerate(value):
        if not 0 < len(stop.encode()) <= MAX_STOP_BYTES:
            return f"string {i} has {len(stop.encode())} bytes, 1 to {MAX_STOP_BYTES} are allowed"
    return None


def _structure_fits(value: str, limits: Limits) -> Complaint:
    fits = len(value) <= MAX_STRUCTURE_BYTES and len(value.encode()) <= MAX_STRUCTURE_BYTES
    return None if fits else f"is larger than {MAX_STRUCTURE_BYTES} bytes"


def _no_empty_text(value: Sequence[str], limits: Limits) -> Complaint:
    return None if all(value) else "must not hold an empty text"


def _answer_fits(value: int, limits: Limits) -> Complaint:
    high = min(limits.max_answer_tokens, limits.max_context_tokens - 1)
    return None if 1 <= value <= high else f"must be from 1 to {high}, not {value}"


def _min_fits(value: tuple[int, int | None], limits: Limits) -> Complaint:
    min_tokens, max_tokens = value
    high = max_tokens if max_tokens is not None else limits.max_answer_tokens
    return None if min_tokens <= high else f"must be at most max_tokens ({high}), not {min_tokens}"


def _field(name: str) -> Callable[[Any], Any]:
    """Reads a dotted field; None where it, or a message that holds it, is absent."""
    *outer, last = name.split(".")

    def read(message: Any) -> Any:
        for part in outer:
            if not message.HasField(part):
                return None
            message = getattr(message, part)
        descriptor = message.DESCRIPTOR.fields_by_name[last]
        if descriptor.has_presence and not message.HasField(last):
            return None
        return getattr(message, last)

    return read


def _rule(
    name: str, complain: Callable[[Any, Limits], Complaint], reason: ErrorReason = ErrorReason.INVALID_ARGUMENT
) -> Rule:
    return Rule(name, _field(name), complain, reason)


def _given(complaint: str) -> Callable[[Any, Limits], Complaint]:
    """Complains of what is empty or false."""
    return lambda value, limits: None if value else complaint


def _present(field: str, names: str) -> Rule:
    return Rule(field, lambda request: request.WhichOneof(field) or "", _given(names))


def _message(field: str) -> Rule:
    return Rule(field, lambda request: request.HasField(field), _given("must be given"))


_TEXT = (
    _rule("text", _not_empty),
    _rule("text", _text_fits, ErrorReason.TOO_LARGE),
    _rule("chat.messages", _not_empty),
    _rule("chat.messages", _at_most(MAX_CHAT_MESSAGES), ErrorReason.TOO_LARGE),
    _rule("chat.messages", _roles),
    _rule("chat.messages", _chat_fits, ErrorReason.TOO_LARGE),
)
_IDS = (
    _rule("token_ids.ids", _not_empty),
    _rule("token_ids.ids", _ids_fit, ErrorReason.CONTEXT_TOO_LONG),
    _rule("token_ids.ids", _known_tokens),
)

_NAMESPACE = Rule(
    "namespace",
    lambda request: request.namespace or None,
    lambda value, limits: None if is_namespace(value) else "must be names [A-Za-z0-9._-]+ separated by slashes",
)
_GIVEN_NAMESPACE = Rule("namespace", lambda request: request.namespace, _given("must be given"))

_STRUCTURED = "structured_output"
_STRUCTURE = (
    Rule(
        _STRUCTURED,
        lambda r: (r.structured_output.WhichOneof("structure") or "") if r.HasField(_STRUCTURED) else None,
        _given("needs one of json_schema, regex, grammar, choice and json_object"),
    ),
    *(
        _rule(f"{_STRUCTURED}.{form}", complain, reason)
        for form in ("json_schema", "regex", "grammar")
        for complain, reason in (
            (_not_empty, ErrorReason.INVALID_ARGUMENT),
            (_structure_fits, ErrorReason.TOO_LARGE),
        )
    ),
    _rule(f"{_STRUCTURED}.choice.values", _not_empty),
    _rule(f"{_STRUCTURED}.choice.values", _at_most(MAX_CHOICES), ErrorReason.TOO_LARGE),
    _rule(f"{_STRUCTURED}.choice.values", _no_empty_text),
    _rule(
        f"{_STRUCTURED}.choice.values",
        lambda values, limits: _structure_fits("".join(values), limits),
        ErrorReason.TOO_LARGE,
    ),
)

GENERATE = (
    _NAMESPACE,
    Rule("request_id", lambda request: request.request_id or None, _matches(_REQUEST_ID)),
    _present("prompt", "one of text, token_ids and chat must be given"),
    *_TEXT,
    *_IDS,
    _rule("n", _whole(1, MAX_N)),
    _rule("sampling.temperature", _real(0, 100)),
    _rule("sampling.top_k", lambda v, limits: _whole(0, limits.vocab_size)(v, limits)),
    _rule("sampling.top_p", _real(0, 1, above_low=True)),
    _rule("sampling.min_p", _real(0, 1)),
    _rule("sampling.typical_p", _real(0, 1, above_low=True)),
    _rule("sampling.repetition_penalty", _real(0, 10, above_low=True)),
    _rule("sampling.presence_penalty", _real(-2, 2)),
    _rule("sampling.frequency_penalty", _real(-2, 2)),
    _rule("sampling.logit_bias", _at_most(MAX_BIASES)),
    _rule("sampling.logit_bias", _biases),
    _rule("sampling.top_logprobs", _whole(0, MAX_TOP_LOGPROBS)),
    Rule(
        "sampling.top_logprobs",
        lambda request: request.sampling.top_logprobs if not request.sampling.logprobs else None,
        lambda v, limits: "needs logprobs" if v else None,
    ),
    _rule("stopping.max_tokens", _answer_fits),
    Rule(
        "stopping.min_tokens",
        lambda r: (r.stopping.min_tokens, r.stopping.max_tokens if r.stopping.HasField("max_tokens") else None),
        _min_fits,
    ),
    _rule("stopping.stop", _at_most(MAX_STOPS)),
    _rule("stopping.stop", _stop_sizes),
    _rule("stopping.stop_token_ids", _at_most(MAX_STOP_IDS)),
    _rule("stopping.stop_token_ids", _known_tokens),
    *_STRUCTURE,
)
TOKENIZE = (_present("prompt", "one of text and chat must be given"), *_TEXT)
ABORT = (_rule("request_id", _matches(_REQUEST_ID)),)
ABORT_SEQUENCE = (_rule("id", _matches(_SEQUENCE_ID)), _NAMESPACE)
LIST_SEQUENCES = (Rule("id", lambda request: request.id or None, _matches(_SEQUENCE_ID)),)
WATCH_TIERS = (
    # 0 is a proto3 absent value; NaN and -0.0 are not.
    Rule("interval_s", lambda r: None if r.interval_s == 0 else r.interval_s, _real(MIN_WATCH_S, MAX_WATCH_S)),
)
_EVENT_KIND = _member(admin_pb2.EventKind.DESCRIPTOR, given=True)
WATCH_EVENTS = (
    _rule("log_id", _matches(_LOG_ID)),
    _rule("kinds", _at_most(MAX_EVENT_KINDS)),
    _rule("kinds", lambda kinds, limits: next(filter(None, (_EVENT_KIND(kind, limits) for kind in kinds)), None)),
)
_TIER = _member(cache_pb2.CacheTier.DESCRIPTOR)
_GIVEN_TIER = _member(cache_pb2.CacheTier.DESCRIPTOR, given=True)
_TTL = _rule("ttl_s", _real(0, MAX_TTL_S, above_low=True))
# Of a message that is a prompt; its name comes from the field that holds it.
PROMPT = (
    Rule("", lambda prompt: prompt.WhichOneof("prompt") or "", _given("needs one of text, token_ids and chat")),
    *_TEXT,
    *_IDS,
)
WARM_PREFIX = (
    _NAMESPACE,
    Rule("key", lambda request: request.key or None, _matches(_REQUEST_ID)),
    _rule("prompts", _not_empty),
    _rule("prompts", _at_most(MAX_WARM_PROMPTS), ErrorReason.TOO_LARGE),
    _rule("tier", _TIER),
    _TTL,
    Rule(
        "durable",
        lambda request: request.tier == cache_pb2.CACHE_TIER_DISK if request.durable else None,
        _given("needs tier CACHE_TIER_DISK"),
    ),
    Rule("detached", lambda request: request.key if request.detached else None, _given("needs a key")),
)
LOOKUP_PREFIX = (_NAMESPACE, _message("prompt"))
SELECTED_PREFIX = (
    _NAMESPACE,
    _message("prefix"),
    Rule("prefix", lambda r: r.prefix.WhichOneof("prefix") or "", _given("needs one of key and prompt")),
    _rule("prefix.key", _matches(_KEY)),
)
PIN_PREFIX = (*SELECTED_PREFIX, _TTL)
LIST_PREFIXES = (
    _NAMESPACE,
    _rule("page_size", _whole(0, MAX_PREFIX_ROWS)),
    _rule("page_token", _matches(_PAGE_TOKEN)),
    _rule("key_prefix", _matches(_KEY_PREFIX)),
    _rule("order", _member(cache_pb2.PrefixOrder.DESCRIPTOR)),
)
FLUSH_TIER = VERIFY_TIER = (_rule("tier", _GIVEN_TIER),)
SET_QUOTA = (
    _GIVEN_NAMESPACE,
    _NAMESPACE,
    Rule(
        "cached_bytes",
        lambda r: r.HasField("cached_bytes") or r.HasField("pinned_bytes"),
        _given("or pinned_bytes must be given"),
    ),
    _rule("cached_bytes", _whole(0, MAX_QUOTA_BYTES)),
    _rule("pinned_bytes", _whole(0, MAX_QUOTA_BYTES)),
    Rule(
        "pinned_bytes",
        lambda r: r.pinned_bytes <= r.cached_bytes if r.HasField("cached_bytes") else None,
        _given("must be at most cached_bytes"),
    ),
)
REMOVE_QUOTA = (_GIVEN_NAMESPACE, _NAMESPACE)
DRAIN = (_rule("timeout_s", _real(0, MAX_DRAIN_S)),)
NO_LIMITS = Limits(vocab_size=1, max_context_tokens=1, max_answer_tokens=1, max_prompt_bytes=1)
