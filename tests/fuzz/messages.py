"""Messages with values that nobody would send: made from descriptors, or from a sound message by a few changes."""

import random
import struct
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MAX_DEPTH = 5
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}
_FLOATS = (
    0.0, -0.0, 1.0, 0.5, 2.0, -1.0, 101.0, float("nan"), float("inf"), float("-inf"), 1e-45, 1e-320, 3e38, -3e38, 1e308,
)  # fmt: skip
NAMES = ("a", "b", "v", "job", "kept", "a/0", "b/7", "r-1", "default", "default/part", "default/x", "other", "..", ".")
TEXTS = (
    "", " ", "\0", "a\0b", "x" * 129, "x" * 300, "é" * 70, "\u202e\u200b\ufeff", "\U0001f600" * 40, "\ufffe\uffff",
    "%s%n%x",
    "../../../../etc/passwd", "/dev/zero", "file:///etc/passwd", "C:\\con", "a/../../b", "//", "~root/.ssh/id_rsa",
    "{{ 7 * 7 }}", "{% for a in range(999999) %}x{% endfor %}", "{{ ''.__class__.__mro__ }}", "<|end|>" * 30,
    "$(reboot)",
    "'; DROP TABLE records; --", "[" * 500, '{"a":' * 200, '{"$ref":"#"}', '{"type":"string","pattern":"(a+)+$"}',
    "(a*)*b", "a{1000}{1000}", "start: start", 'start: "a" start | "b"', "f" * 64, "0" * 64, "F" * 64, "g" * 64, "hang",
    "-1", "9" * 400, "NaN", "null", "true", "\r\n\r\nHTTP/1.1 200 OK", "a" * 2_000,
)  # fmt: skip


class Maker:
    """Makes messages. Every choice is the random source's, so that a seed repeats a run."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def fresh(self, message_type: type[Message]) -> Message:
        """A message with any fields, each with any value."""
        message = message_type()
        self._fill(message, density=self._rng.choice((0.15, 0.4, 0.9)), depth=0)
        return message

    def changed(self, sound: Message) -> Message:
        """A sound message with a field or a few changed."""
        message = type(sound)()
        message.CopyFrom(sound)
        for _ in range(self._rng.choice((1, 1, 1, 2, 3))):
            self._change(message)
        return message

    def _fill(self, message: Message, *, density: float, depth: int) -> None:
        for field in _fields(message):
            if self._rng.random() < density:
                self._set(message, field, density, depth)

    def _change(self, message: Message) -> None:
        """A field of it, or of a message within it."""
        depth = 0
        while True:
            fields = _fields(message)
            if not fields:
                return
            field = self._rng.choice(fields)
            is_single = field.message_type is not None and not field.is_repeated
            if is_single and message.HasField(field.name) and self._rng.random() < 0.9:
                message = getattr(message, field.name)
                depth += 1
                continue
            if field.has_presence and message.HasField(field.name) and self._rng.random() < 0.2:
                message.ClearField(field.name)
            else:
                self._set(message, field, 0.4, depth)
            return

    def _set(self, message: Message, field: Any, density: float, depth: int) -> None:
        if field.is_repeated:
            self._set_repeated(message, field, density, depth)
        elif field.message_type is not None:
            inner = getattr(message, field.name)
            inner.SetInParent()
            if depth < MAX_DEPTH:
                self._fill(inner, density=density, depth=depth + 1)
        else:
            setattr(message, field.name, self._value(field))

    def _set_repeated(self, message: Message, field: Any, density: float, depth: int) -> None:
        count = self._rng.choice((0, 1, 1, 1, 2, 2, 3, 9)) if self._rng.random() < 0.97 else 70
        values = getattr(message, field.name)
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
            for _ in range(count):
                if value.message_type is None:
                    values[self._value(key)] = self._value(value)
                else:
                    values[self._value(key)].SetInParent()
        elif entry is not None:
            for _ in range(count):
                inner = values.add()
                if depth < MAX_DEPTH:
                    self._fill(inner, density=density, depth=depth + 1)
        else:
            if self._rng.random() < 0.02:
                count = 5_000
            one = self._value(field)
            values.extend(one if self._rng.random() < 0.5 else self._value(field) for _ in range(count))

    def _value(self, field: Any) -> Any:
        kind = field.cpp_type
        if kind in _INTEGERS:
            return self._integer(*_INTEGERS[kind])
        match kind:
            case FieldDescriptor.CPPTYPE_FLOAT:
                return _as_float32(self._rng.choice(_FLOATS))
            case FieldDescriptor.CPPTYPE_DOUBLE:
                return self._rng.choice(_FLOATS)
            case FieldDescriptor.CPPTYPE_BOOL:
                return self._rng.random() < 0.5
            case FieldDescriptor.CPPTYPE_ENUM:
                return self._rng.choice((0, 1, 2, 3, 4, 99, -1, (1 << 31) - 1))
            case _:
                return self._text(field)

    def _integer(self, low: int, high: int) -> int:
        if self._rng.random() < 0.7:
            return min(max(self._rng.choice((0, 1, 2, 3, 5, 8, 20, 64, 300, -1)), low), high)
        return self._rng.choice((low, low + 1, high, high - 1, high // 2, high // 2 + 1, self._rng.randint(low, high)))

    def _text(self, field: Any) -> str | bytes:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._rng.randbytes(self._rng.choice((0, 1, 40)))
        return self._rng.choice(NAMES if self._rng.random() < 0.4 else TEXTS)


def _fields(message: Message) -> list[Any]:
    descriptor: Any = message.DESCRIPTOR
    return list(descriptor.fields)


def _as_float32(value: float) -> float:
    """The nearest that a float field takes; what is too large becomes infinite, as it would on the wire."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return float("inf")
