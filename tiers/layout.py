"""What a sequence's state is made of, declared by a model and read by everything that stores or moves state.

History that grows lives in planes, a fixed number of rows a block; everything else lives in slot tensors. A block is
the rows of all planes of all layers for `block_size` tokens, laid out as one contiguous image; a slot is the image of
all slot tensors. The device pools, the files and the transfers all use these two images. Imports neither torch nor
numpy.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

ALIGNMENT_BYTES = 256  # each part of an image starts at a multiple: vector loads and DMA like it

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int32": 4, "int64": 8, "uint8": 1}


@dataclass(frozen=True, slots=True)
class Plane:
    """A tensor of one layer that grows with the sequence: one row for every `tokens_per_row` tokens."""

    name: str  # unique in the model, such as "layers.3.k"
    dtype: str
    row_shape: tuple[int, ...]
    tokens_per_row: int = 1
    # Read whole for every row, as index keys are: kept in memory where the block is on disk. Changes no byte of images.
    is_scanned: bool = field(default=False, repr=False)


@dataclass(frozen=True, slots=True)
class SlotTensor:
    """A tensor of one layer with a fixed size for each sequence, such as a recurrent state. Starts as zeros."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Where one plane's rows or one slot tensor lies inside an image: bytes [offset, offset + num_bytes)."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of this part: (rows, *row_shape) in a block, shape in a slot
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StateLayout:
    """All planes and slot tensors of a model, in order, and the images they form.

    Raises:
        ValueError: two parts share a name, a dtype is unknown, a dimension is not positive, or a plane's
            tokens_per_row does not divide the block size.
    """

    planes: tuple[Plane, ...]
    slots: tuple[SlotTensor, ...]
    block_size: int
    # Worked out once: they are asked for with every block that moves.
    block_parts: tuple[Part, ...] = field(init=False, repr=False, compare=False)  # each plane's place in a block image
    slot_parts: tuple[Part, ...] = field(init=False, repr=False, compare=False)  # each slot tensor's in a slot image
    block_bytes: int = field(init=False, repr=False, compare=False)  # of a block image, padding included
    slot_bytes: int = field(init=False, repr=False, compare=False)  # of a slot image; 0 for a model without slots

    def __post_init__(self) -> None:
        names = [p.name for p in self.planes] + [s.name for s in self.slots]
        if len(set(names)) != len(names):
            raise ValueError("two parts of the state share a name")
        if self.block_size < 1:
            raise ValueError(f"block_size must be positive, not {self.block_size}")
        for plane in self.planes:
            _check_part(plane.name, plane.dtype, plane.row_shape)
            if plane.tokens_per_row < 1 or self.block_size % plane.tokens_per_row:
                raise ValueError(
                    f"plane {plane.name}: {plane.tokens_per_row} tokens a row do not divide blocks of {self.block_size}"
                )
        for slot in self.slots:
            _check_part(slot.name, slot.dtype, slot.shape)
        rows = self.block_size
        block_parts = _place((p.name, p.dtype, (rows // p.tokens_per_row, *p.row_shape)) for p in self.planes)
        slot_parts = _place((s.name, s.dtype, s.shape) for s in self.slots)
        object.__setattr__(self, "block_parts", block_parts)
        object.__setattr__(self, "slot_parts", slot_parts)
        object.__setattr__(self, "block_bytes", _end(block_parts))
        object.__setattr__(self, "slot_bytes", _end(slot_parts))

    @property
    def bytes_per_token(self) -> int:
        """Payload bytes that one more token adds to the planes, padding excluded."""
        return sum(DTYPE_BYTES[p.dtype] * prod(p.row_shape) // p.tokens_per_row for p in self.planes)

    def check_grid(self, grid: int) -> None:
        """Raises ValueError where the grid is not a whole number of blocks (and so of every plane's rows)."""
        if grid < self.block_size or grid % self.block_size:
            raise ValueError(f"grid {grid} is not a multiple of block size {self.block_size}")

    def digest(self) -> bytes:
        """32 bytes that differ wherever two layouts would read each other's images wrongly."""
        text = repr((self.planes, self.slots, self.block_size, ALIGNMENT_BYTES))
        return hashlib.blake2b(text.encode(), digest_size=32).digest()


def _check_part(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"{name}: unknown dtype {dtype}")
    if any(dim < 1 for dim in shape):
        raise ValueError(f"{name}: shape {shape} has a dimension that is not positive")


def _place(parts: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[Part, ...]:
    placed: list[Part] = []
    offset = 0
    for name, dtype, shape in parts:
        num_bytes = DTYPE_BYTES[dtype] * prod(shape)
        placed.append(Part(name, dtype, shape, offset, num_bytes))
        offset += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(placed)


def _end(parts: tuple[Part, ...]) -> int:
    if not parts:
        return 0
    last = parts[-1]
    return last.offset + -(-last.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
