"""What the front and a tokenizer worker say to each other, on the worker's stdin and stdout.

Frames are as in daemon/messages.py: a 4-byte length and MessagePack. One question at a time; each has one reply.
"""

import msgspec

from daemon.messages import HEADER

MAX_REPLY_BYTES = 64 << 20


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """One message of a chat."""

    role: str
    content: str


class EncodeText(msgspec.Struct, frozen=True, tag=True):
    """Tokenize a text as it is, with the tokenizer's own special tokens around it."""

    text: str


class EncodeChat(msgspec.Struct, frozen=True, tag=True):
    """Render the template, generation prompt included, and tokenize that."""

    turns: tuple[Turn, ...]
    max_bytes: int  # of the rendered text


class GetTable(msgspec.Struct, frozen=True, tag=True):
    """Send the bytes of every token."""


class Encoded(msgspec.Struct, frozen=True, tag=True):
    """Token ids, little-endian int32."""

    ids: bytes


class Table(msgspec.Struct, frozen=True, tag=True):
    """The bytes of every token, by id."""

    tokens: tuple[bytes, ...]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """This question has no answer, and why: fit for a client to read."""

    message: str
    too_large: bool = False


Question = EncodeText | EncodeChat | GetTable
Reply = Encoded | Table | Failed

_encoder = msgspec.msgpack.Encoder()
question_decoder = msgspec.msgpack.Decoder(Question)
reply_decoder = msgspec.msgpack.Decoder(Reply)


def frame(message: Question | Reply) -> bytes:
    """The message with its length in front."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body
