"""What picks the keys of a sparse layer: narrow queries and keys of its own, of single tokens or of pools of them.

A pool's key is one row of a plane, written when the pool is complete; raw rows of the pool that is still open wait in a
slot. So history is sliced by position like any other, and a checkpoint holds at most pool - 1 rows.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
from torch.nn import functional

from daemon.batch import Batch
from daemon.layers.inputs import Inputs, Rotary
from daemon.layers.linear import Linear
from daemon.layers.mla import Rotation, dtype_name
from daemon.layers.parameters import Scope
from kernels.dispatch import Kernels
from kernels.indexer import Selection, fill_pools, gated_pool_keys, step_pools
from kernels.key_tiles import scatter_rows
from tiers.layout import Plane, SlotTensor
from tiers.pools import DevicePools

PoolKeys = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Keys [P, D] of complete pools, from their raw rows [P, pool, width] and the positions [P] of their first tokens."""

Selections = Generator[None, None, list[Selection]]
"""A computation with pauses; one selection a piece of the batch."""


@dataclass(frozen=True, slots=True)
class IndexSizes:
    """Heads and widths, and how much is kept."""

    heads: int
    head_dim: int
    pool: int  # tokens a key covers
    count: int  # keys that a query keeps


@dataclass(frozen=True, slots=True)
class DsaIndexConfig:
    """Sizes and variants of a DSA indexer."""

    sizes: IndexSizes
    hidden_size: int
    q_rank: int
    heads_dtype: torch.dtype  # of the head weights' matrix
    rope_dim: int  # leading channels that turn
    rotation: Rotation | None


def index_plane(sizes: IndexSizes, layer: int, dtype: torch.dtype) -> Plane:
    """One key a pool."""
    return Plane(f"layers.{layer}.index_k", dtype_name(dtype), (sizes.head_dim,), sizes.pool, is_scanned=True)


@dataclass(frozen=True, slots=True)
class PoolState:
    """Where the keys and the open pool of a layer live, and how a pool becomes a key."""

    plane: Plane
    tail: SlotTensor | None  # [pool - 1, raw width]; None where every token is its own pool
    make_keys: PoolKeys
    kernels: Kernels

    @property
    def slots(self) -> tuple[SlotTensor, ...]:
        return () if self.tail is None else (self.tail,)

    def advance(self, raw: torch.Tensor, batch: Batch, pools: DevicePools) -> None:
        """Takes the rows' raw keys [rows, width]: writes the keys of completed pools, keeps the rest in slot_out."""
        plane = pools.planes[self.plane.name]
        pool = self.plane.tokens_per_row
        if batch.is_decode and self.kernels.replays:
            self._advance_step(raw, batch, pools)
            return
        for s, start in enumerate(batch.starts):
            rows, table = slice(batch.cu_rows[s], batch.cu_rows[s + 1]), batch.block_tables[s]
            if self.tail is None:
                unfinished = raw.new_empty((0, raw.shape[1]))
            else:
                unfinished = pools.slot_tensors[self.tail.name].index_select(0, batch.slot_in[s : s + 1])[0]
            filled = fill_pools(unfinished, raw[rows], start=start, pool=pool)
            if filled.complete.shape[0]:
                last = filled.first + filled.complete.shape[0]
                firsts = torch.arange(filled.first, last, device=raw.device) * pool
                scatter_rows(plane, table, filled.first, self.make_keys(filled.complete, firsts))
            if self.tail is not None:
                tails = pools.slot_tensors[self.tail.name]
                tails.index_copy_(0, batch.slot_out[s : s + 1], filled.unfinished[None])

    def _advance_step(self, raw: torch.Tensor, batch: Batch, pools: DevicePools) -> None:
        """One row of each sequence, told by device tensors alone. A row that completes no pool writes to block 0."""
        plane, pool = pools.planes[self.plane.name], self.plane.tokens_per_row
        offsets = batch.row_offsets // pool
        if self.tail is None:
            plane.index_put_((batch.row_blocks, offsets), self.make_keys(raw[:, None], batch.positions))
            return
        tails = pools.slot_tensors[self.tail.name]
        step = step_pools(tails.index_select(0, batch.slot_in), raw, batch.positions, pool)
        keys = self.make_keys(step.complete, batch.positions // pool * pool)
        plane.index_put_((batch.row_blocks * step.is_complete, offsets * step.is_complete), keys)
        tails.index_copy_(0, batch.slot_out, step.unfinished)

    def select(
        self, queries: torch.Tensor, weights: torch.Tensor, inputs: Inputs, pools: DevicePools, *, count: int
    ) -> Selections:
        """Selections of each piece of the batch, for queries [rows, H, D] with head weights [rows, H]."""
        plane = pools.planes[self.plane.name]
        found: list[Selection] = []
        select_keys = self.kernels.attention.select_keys
        for rows, span in inputs.pieces:
            yield
            pool = self.plane.tokens_per_row
            found.append(select_keys(queries[rows], weights[rows], plane, span, pool=pool, count=count))
        return found


def pool_tail(sizes: IndexSizes, layer: int, dtype: torch.dtype, raw_width: int) -> SlotTensor | None:
    """The slot of the open pool."""
    if sizes.pool == 1:
        return None
    return SlotTensor(f"layers.{layer}.index_tail", dtype_name(dtype), (sizes.pool - 1, raw_width))


class DsaIndexer:
    """DeepSeek sparse attention: relu scores weighed by head. Keys are of single tokens or gated pools.

    Reads checkpoint names wq_b, wk, k_norm, weights_proj, and of pools index_kpool_compress_{gate,ape} of its scope.
    """

    def __init__(self, scope: Scope, layer: int, config: DsaIndexConfig) -> None:
        self.config = config
        sizes, dtype = config.sizes, scope.parameters.dtype
        self.q = Linear(scope, (("wq_b", sizes.heads * sizes.head_dim),), config.q_rank)
        self.k_norm_weight = scope.tensor("k_norm.weight", sizes.head_dim)
        self.k_norm_bias = scope.tensor("k_norm.bias", sizes.head_dim)
        self.heads = scope.tensor("weights_proj.weight", sizes.heads, config.hidden_size, dtype=config.heads_dtype)
        raw_width = sizes.head_dim * (1 if sizes.pool == 1 else 2)
        self.k = scope.parameters.allocate((raw_width, config.hidden_size))  # keys above gates
        scope.fill("wk.weight", self.k[: sizes.head_dim])
        self.ape: torch.Tensor | None = None
        if sizes.pool > 1:
            scope.fill("index_kpool_compress_gate", self.k[sizes.head_dim :])
            self.ape = scope.tensor("index_kpool_compress_ape", sizes.pool, sizes.head_dim)
        tail = pool_tail(sizes, layer, dtype, raw_width)
        self.state = PoolState(index_plane(sizes, layer, dtype), tail, self._make_keys, scope.kernels)

    @property
    def active_params(self) -> int:
        """Weights that multiply each token."""
        return self.q.in_size * self.q.out_size + self.k.numel() + self.heads.numel()

    @property
    def pair_flops(self) -> int:
        """FLOPs of one query token with one history token."""
        sizes = self.config.sizes
        return 2 * sizes.heads * sizes.head_dim // sizes.pool

    def select(self, hidden: torch.Tensor, low_rank: torch.Tensor, inputs: Inputs, pools: DevicePools) -> Selections:
        """Writes the rows' keys and selects for them."""
        config, sizes = self.config, self.config.sizes
        queries = self.q(low_rank).view(-1, sizes.heads, sizes.head_dim)
        both = functional.linear(hidden, self.k)
        keys = functional.layer_norm(
            both[:, : sizes.head_dim], (sizes.head_dim,), self.k_norm_weight, self.k_norm_bias, eps=1e-6
        )
        if config.rotation is not None:
            assert inputs.rotary is not None
            queries = self._rotate(queries, config.rotation, inputs.rotary)
            keys = self._rotate(keys[:, None], config.rotation, inputs.rotary)[:, 0]
        raw = torch.cat((keys, both[:, sizes.head_dim :]), dim=-1)
        self.state.advance(raw, inputs.batch, pools)
        heads = functional.linear(hidden.to(self.heads.dtype), self.heads).float() * sizes.heads**-0.5
        return (yield from self.state.select(queries, heads, inputs, pools, count=sizes.count))

    def _rotate(self, x: torch.Tensor, rotation: Rotation, rotary: Rotary) -> torch.Tensor:
        """The rope part comes first."""
        rope_dim = self.config.rope_dim
        return torch.cat((rotation(x[..., :rope_dim], rotary), x[..., rope_dim:]), dim=-1)

    def _make_keys(self, complete: torch.Tensor, _firsts: torch.Tensor) -> torch.Tensor:
        if self.ape is None:
            return complete[:, 0]
        keys, gates = complete.chunk(2, dim=-1)
        return gated_pool_keys(keys, gates, self.ape)
