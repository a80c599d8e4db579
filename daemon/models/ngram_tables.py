"""The constants of n-gram tables, from a checkpoint's buffers or worked out anew, and the tables themselves.

Each head of each table has a prime of its own as its size, the next ones above a base; multipliers come from a seed by
splitmix64. A checkpoint carries all of them, and then they are what counts.
"""

from dataclasses import dataclass
from math import isqrt

import torch

from daemon.layers.ngram_table import NgramTable, RowFormat, RowSource, SeededTable
from daemon.layers.parameters import Scope
from daemon.models.base import BuildOptions
from daemon.models.fields import Fields, read_json
from daemon.weights.errors import CheckpointError
from daemon.weights.tables import find_table
from kernels.ngram import NgramHash

CACHE_BYTES = 64 << 20  # of a table's rows in memory
NUM_READERS = 8
MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15  # of splitmix64
TABLE_SEED_STEP = 10007


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """What the tables of a model have in common."""

    vocab_size: int
    eos_id: int
    order: int  # largest n
    heads_per_order: int
    size_base: int
    seed: int
    head_dim: int  # of one head's embedding

    @property
    def num_heads(self) -> int:
        """Of one table."""
        return (self.order - 1) * self.heads_per_order


def ngram_config(fields: Fields, options: BuildOptions, embed_dim: int) -> NgramConfig:
    """Reads and checks the fields.

    Raises:
        ConfigError: a value is missing, out of bounds, or does not fit the others.
    """
    # generation_config.json may add end tokens for stopping; the hash knows only the configuration's own first one.
    own = fields if options.folder is None else read_json(options.folder / "config.json")
    ends = (own.section("text_config") or own).counts("eos_token_id") or own.counts("eos_token_id")
    if not ends:
        raise fields.fail("eos_token_id", "is missing, and n-grams stop at it")
    order, heads = fields.count("ngram_size", 3, least=2), fields.count("heads_per_ngram", 8)
    num_heads = (order - 1) * heads
    if embed_dim % num_heads:
        raise fields.fail("ple_embed_dim", f"{embed_dim} is not a multiple of {num_heads} n-gram heads")
    return NgramConfig(
        vocab_size=fields.count("vocab_size"),
        eos_id=ends[0],
        order=order,
        heads_per_order=heads,
        size_base=fields.count("ngram_vocab_size_base", 20_000_000),
        seed=fields.count("seed", 1234, least=0),
        head_dim=embed_dim // num_heads,
    )


def open_table(scope: Scope, config: NgramConfig, index: int, options: BuildOptions) -> tuple[NgramHash, RowSource]:
    """The hash and the rows of table number `index`; `scope` is that of the checkpoint's names for it.

    Raises:
        CheckpointError: shards are missing or damaged, or too few for the rows that the heads name.
    """
    name = f"{scope.prefix}ngram_embedding"
    scope.parameters.ignore(name.replace(".", r"\.") + r"(\.shard_\d+)?\.weight")
    hash_ = ngram_hash(config, index)
    if options.folder is None:
        return hash_, SeededTable(RowFormat(options.dtype, config.head_dim))
    shards, row = find_table(options.folder, name)
    if row.dim != config.head_dim:
        raise CheckpointError(f"table {name!r} has rows of {row.dim}, the configuration says {config.head_dim}")
    table = NgramTable(shards, row, cache_rows=max(1, CACHE_BYTES // row.num_bytes), num_threads=NUM_READERS)
    # The checkpoint's buffers replace what was worked out, and are read like any other tensor.
    scope.fill("layer_multipliers", hash_.multipliers)
    scope.fill("ngram_heads_vocab_sizes", hash_.head_sizes)
    scope.fill("ngram_heads_offsets", hash_.head_offsets)

    def check() -> None:
        if int(hash_.head_sizes.min()) < 1 or int(hash_.head_offsets.min()) < 0:
            raise CheckpointError(f"table {name!r} has a head without rows")
        if int((hash_.head_offsets + hash_.head_sizes).max()) > table.num_rows:
            raise CheckpointError(f"table {name!r} has {table.num_rows} rows, fewer than its heads name")

    scope.parameters.when_filled(check)
    return hash_, table


def ngram_hash(config: NgramConfig, index: int) -> NgramHash:
    """The constants of table number `index`, worked out."""
    sizes: list[int] = []
    prime = config.size_base - 1
    for head in range((index + 1) * config.num_heads):
        prime = _next_prime(prime)
        if head >= index * config.num_heads:
            sizes.append(prime)
    offsets = [sum(sizes[:head]) for head in range(len(sizes))]
    bound = max(1, ((1 << 63) - 1) // config.vocab_size // 2)
    seed = config.seed + TABLE_SEED_STEP * index
    multipliers = [2 * (_splitmix64((seed + GAMMA * (n + 1)) & MASK) % bound) + 1 for n in range(config.order)]
    return NgramHash(torch.tensor(multipliers), torch.tensor(sizes), torch.tensor(offsets), config.eos_id)


def _splitmix64(value: int) -> int:
    value = (value + GAMMA) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def _next_prime(above: int) -> int:
    value = above + 1
    while value < 2 or any(value % divisor == 0 for divisor in range(2, isqrt(value) + 1)):
        value += 1
    return value
