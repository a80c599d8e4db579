"""Bytes that are nearly a message: cut, doubled, flipped, spliced, with lengths that lie and numbers without end."""

import random

_BOMBS = (
    b"\xff" * 11,  # a varint that is too long
    b"\x80" * 400,  # one without end
    b"\x0a\xff\xff\xff\xff\x0f",  # a length of 4 GiB
    b"\x12\x80\x80\x80\x80\x10",
    b"\xfa\xff\xff\xff\x0f\x00",  # the largest field number, empty
    b"\x00\x00",  # field number 0
    b"\x0b" * 300,  # groups that open
    b"\x0c",  # and one that closes
    b"\x0b\x0c" * 200,
    b"\x9b\x06" + b"\x08\x01" * 50 + b"\x9c\x06",  # an unknown group, sound
    b"\x0e",  # wire types that there are not
    b"\x0f",
    b"\x98\x06\x01" * 1_000,  # unknown fields
    b"\x99\x06" + b"\x00" * 8,
    b"\x9d\x06" + b"\x00" * 4,
)


def nested(depth: int, tag: bytes = b"\x1a") -> bytes:
    """A field within itself, so many times: by default number 3."""
    data = b""
    for _ in range(depth):
        data = tag + _varint(len(data)) + data
    return data


def mutated(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """`data` after a few changes; `other` is something to take parts of."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(len(found) + 1)
        end = min(len(found), at + rng.choice((1, 2, 4, 16, 64)))
        match rng.randrange(9):
            case 0 if found:
                place = rng.randrange(len(found))
                found[place] ^= 1 << rng.randrange(8)
            case 1:
                found[at:end] = rng.randbytes(rng.choice((0, 1, 4, 16)))
            case 2:
                del found[at:]
            case 3:
                found[at:at] = found[at:end] * rng.choice((1, 3, 40))
            case 4:
                found[at:at] = rng.choice(_BOMBS)
            case 5:
                found += other  # merged: another member of a oneof, a field twice
            case 6:
                found[at:end] = other[: rng.randrange(len(other) + 1)]
            case 7:
                found[at:at] = nested(rng.choice((3, 50, 120)), rng.choice((b"\x0a", b"\x12", b"\x1a", b"\x22")))
            case _:
                del found[at:end]
    return bytes(found[:100_000])


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
