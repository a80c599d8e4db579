"""Gated grouped-query attention over selected blocks of keys: QSA.

Each run of `ratio` tokens has one index key, the mean of their raw keys, normed and rotated at the run's first
position. A query attends to its best runs and to the tail that no run covers yet; the output is gated by channel.
"""

from dataclasses import dataclass

import torch

from daemon.layers.indexer import IndexSizes, PoolState, Selections, index_plane, pool_tail
from daemon.layers.inputs import Inputs
from daemon.layers.linear import Linear
from daemon.layers.mla import PAGED_CAPS, dtype_name
from daemon.layers.norms import ZeroCentredRmsNorm
from daemon.layers.parameters import Scope
from daemon.layers.recurrent import columns
from daemon.layers.rope import Rope, rotate
from daemon.layers.steps import Steps
from kernels.indexer import mean_pool_keys
from tiers.layout import Plane
from tiers.pools import DevicePools


@dataclass(frozen=True, slots=True)
class QsaConfig:
    """Sizes of one layer."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    index: IndexSizes
    norm_eps: float


class QsaAttention:
    """Reads {q,k,v,o}_proj and {q,k}_norm of its scope, and index_qk_proj and {q,k}_layernorm of its `indexer`."""

    caps = PAGED_CAPS

    def __init__(self, scope: Scope, layer: int, config: QsaConfig, rope: Rope) -> None:
        self.config = config
        self.rope = rope
        self.scale = config.head_dim**-0.5
        self._forms = scope.kernels.attention
        hidden_size, eps, index = config.hidden_size, config.norm_eps, config.index
        query_width, key_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q = Linear(scope, (("q_proj", 2 * query_width),), hidden_size)  # each head's [query | gate]
        self.kv = Linear(scope, (("k_proj", key_width), ("v_proj", key_width)), hidden_size)
        self.out = Linear(scope, (("o_proj", hidden_size),), query_width)
        self.q_norm = ZeroCentredRmsNorm(scope, "q_norm", config.head_dim, eps)
        self.k_norm = ZeroCentredRmsNorm(scope, "k_norm", config.head_dim, eps)
        below = scope / "indexer"
        self.index_qk = Linear(below, (("index_qk_proj", (index.heads + 1) * index.head_dim),), hidden_size)
        self.index_q_norm = ZeroCentredRmsNorm(below, "q_layernorm", index.head_dim, eps)
        self.index_k_norm = ZeroCentredRmsNorm(below, "k_layernorm", index.head_dim, eps)
        dtype = scope.parameters.dtype
        row_shape = (config.kv_heads, config.head_dim)
        self.k_plane = Plane(f"layers.{layer}.k", dtype_name(dtype), row_shape)
        self.v_plane = Plane(f"layers.{layer}.v", dtype_name(dtype), row_shape)
        tail = pool_tail(index, layer, dtype, index.head_dim)
        self.state = PoolState(index_plane(index, layer, dtype), tail, self._make_keys, scope.kernels)
        self.planes = (self.k_plane, self.v_plane, self.state.plane)
        self.slots = self.state.slots

    @property
    def active_params(self) -> int:
        """Weights that multiply each token."""
        return sum(p.in_size * p.out_size for p in (self.q, self.kv, self.out, self.index_qk))

    @property
    def pair_flops(self) -> int:
        """FLOPs of one query token with one history token."""
        index = self.config.index
        return 4 * self.config.heads * self.config.head_dim + 2 * index.heads * index.head_dim // index.pool

    def forward(self, hidden: torch.Tensor, inputs: Inputs, pools: DevicePools) -> Steps:
        """[rows, hidden_size] to the same; writes keys, values and index keys, attends to what is selected."""
        config, batch = self.config, inputs.batch
        assert inputs.rotary is not None
        selections = yield from self._select(hidden, inputs, pools)
        yield
        queries, gate = self.q(hidden).view(-1, config.heads, 2 * config.head_dim).chunk(2, dim=-1)
        keys, values = self.kv(hidden).view(-1, 2, config.kv_heads, config.head_dim).unbind(1)
        queries = rotate(self.q_norm(queries), inputs.rotary)
        k_plane, v_plane = pools.planes[self.k_plane.name], pools.planes[self.v_plane.name]
        place = (batch.row_blocks, batch.row_offsets)
        k_plane.index_put_(place, rotate(self.k_norm(keys), inputs.rotary))
        v_plane.index_put_(place, values)
        attended: list[torch.Tensor] = []
        for (rows, span), selection in zip(inputs.pieces, selections, strict=True):
            yield
            attended.append(self._forms.sparse(queries[rows], k_plane, v_plane, span, selection, scale=self.scale))
        yield
        return self.out((torch.cat(attended) * torch.sigmoid(gate)).flatten(1))

    def _select(self, hidden: torch.Tensor, inputs: Inputs, pools: DevicePools) -> Selections:
        index = self.config.index
        assert inputs.rotary is not None
        queries, raw = columns(self.index_qk(hidden), (index.heads * index.head_dim, index.head_dim))
        queries = rotate(self.index_q_norm(queries.reshape(-1, index.heads, index.head_dim)), inputs.rotary)
        self.state.advance(raw, inputs.batch, pools)
        ones = torch.ones(queries.shape[:2], device=queries.device)
        return (yield from self.state.select(queries, ones, inputs, pools, count=index.count))

    def _make_keys(self, complete: torch.Tensor, firsts: torch.Tensor) -> torch.Tensor:
        keys = self.index_k_norm(mean_pool_keys(complete))
        return rotate(keys[:, None], self.rope.rows(firsts, keys.dtype))[:, 0]
