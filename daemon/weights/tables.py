"""Finding a table that stays on disk: the shards of one tensor in a folder's files, checked like any other tensor."""

import re
from pathlib import Path

from daemon.layers.ngram_table import RowFormat, TableShard
from daemon.weights.errors import CheckpointError
from daemon.weights.header import TensorEntry, read_header
from daemon.weights.reader import weight_files


def find_table(folder: Path, name: str) -> tuple[tuple[TableShard, ...], RowFormat]:
    """Shards `name.shard_0.weight`, `name.shard_1.weight` ... (or `name.weight` alone) in order, and what a row is.

    Raises:
        CheckpointError: a shard is missing or there twice, or they do not have rows of one kind.
    """
    pattern = re.compile(re.escape(name) + r"(?:\.shard_(\d+))?\.weight")
    found: dict[int, tuple[Path, TensorEntry]] = {}
    for path in weight_files(folder):
        for entry in read_header(path):
            match = pattern.fullmatch(entry.name)
            if match is None:
                continue
            number = int(match[1] or 0)
            if number in found:
                raise CheckpointError(f"table {name!r} has shard {number} twice")
            found[number] = (path, entry)
    if not found or sorted(found) != list(range(len(found))):
        raise CheckpointError(f"table {name!r} lacks shards: {len(found)} are there")
    first = found[0][1]
    if len(first.shape) != 2 or first.dtype.itemsize < 2:
        raise CheckpointError(f"table {name!r} does not consist of rows of numbers")
    row = RowFormat(first.dtype, first.shape[1])
    for number in sorted(found):
        entry = found[number][1]
        if entry.dtype != row.dtype or len(entry.shape) != 2 or entry.shape[1] != row.dim:
            raise CheckpointError(f"table {name!r}: shard {number} has rows of another kind")
    shards = tuple(TableShard(found[n][0], found[n][1].offset, found[n][1].shape[0]) for n in sorted(found))
    return shards, row
