"""What the front and a grammar worker say to each other, on the worker's stdin and stdout.

Frames are as in daemon/messages.py: a 4-byte length and MessagePack. One question at a time; each has one reply.
"""

from enum import StrEnum

import msgspec

from daemon.messages import HEADER

MAX_REPLY_BYTES = 4 << 20


class Structure(StrEnum):
    """How a structure is written; each is the name of its field in downcore.v1.StructuredOutput."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"
    JSON_OBJECT = "json_object"


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Asks whether the vocabulary has been loaded."""


class Check(msgspec.Struct, frozen=True, tag=True):
    """Make this a grammar and try it. `texts` are the choices, or the one text of the other structures."""

    structure: Structure
    texts: tuple[str, ...]


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The worker can check."""


class Checked(msgspec.Struct, frozen=True, tag=True):
    """The grammar as the engine takes it."""

    grammar: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """What is wrong with it: fit for a client to read."""

    message: str


Question = Hello | Check
Reply = Loaded | Checked | Failed

_encoder = msgspec.msgpack.Encoder()
question_decoder = msgspec.msgpack.Decoder(Question)
reply_decoder = msgspec.msgpack.Decoder(Reply)


def frame(message: Question | Reply) -> bytes:
    """The message with its length in front."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body
