"""Requests from bytes, so that bytes that are no request get an answer that says so.

grpc would answer INTERNAL to what does not parse. Here such a request becomes a Malformed value, which the method's
wrapper turns into INVALID_ARGUMENT, naming the string field that is not UTF-8 where that is the fault.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from daemon.errors import ErrorReason, RequestError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_DEPTH = 16
_MAX_FIELDS = 10_000  # looked at for the one that is wrong: a request has room for millions, and the loop waits


@dataclass(frozen=True, slots=True)
class Malformed:
    """A request that does not parse. `field` is the string field that is not UTF-8, or empty."""

    field: str

    def error(self) -> RequestError:
        if self.field:
            return RequestError(ErrorReason.INVALID_ARGUMENT, "is not valid UTF-8", field=self.field)
        return RequestError(ErrorReason.INVALID_ARGUMENT, "the request is not a valid message")


def parser(message_type: type[Message]) -> Callable[[bytes], Message | Malformed]:
    """A deserializer that never fails."""

    def parse(data: bytes) -> Message | Malformed:
        try:
            return message_type.FromString(data)
        except DecodeError:
            descriptor: Any = message_type.DESCRIPTOR
            return Malformed(_bad_string(memoryview(data), descriptor, repeat(None, _MAX_FIELDS), 0))

    return parse


def _bad_string(data: memoryview, descriptor: Descriptor, looks: Iterator[None], depth: int) -> str:
    """The dotted name of the first string field that is not UTF-8; empty where none is found.

    Args:
        looks: one for each field that may still be looked at, whatever message holds it.
    """
    fields = descriptor.fields_by_number
    at = 0
    for _ in looks:
        if at >= len(data):
            return ""
        try:
            tag, at = _varint(data, at)
            kind = tag & 7
            if kind == _VARINT:
                _, at = _varint(data, at)
                continue
            size, at = _varint(data, at) if kind == _BYTES else ({_FIXED64: 8, _FIXED32: 4}[kind], at)
        except (IndexError, KeyError):
            return ""
        body, at = data[at : at + size], at + size
        field = fields.get(tag >> 3)
        if field is None or kind != _BYTES:
            continue
        if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(body):
            return field.name
        if field.message_type is not None and depth < _MAX_DEPTH:
            inner = _bad_string(body, field.message_type, looks, depth + 1)
            if inner:
                return f"{field.name}.{inner}"
    return ""


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError


def _is_utf8(data: memoryview) -> bool:
    try:
        str(data, "utf-8")
    except UnicodeDecodeError:
        return False
    return True
