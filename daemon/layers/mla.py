"""Multi-head latent attention: one narrow latent a token is all that is kept, and heads attend to it in absorbed form.

A row of the plane is [normed latent | rotated rope part]. A family says how its rotation works; a model without
positions in attention rotates nothing, and one without a rope part at all has a row that is the latent alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from daemon.layers.caps import LayerCaps
from daemon.layers.inputs import Inputs, Rotary
from daemon.layers.linear import Linear
from daemon.layers.norms import RmsNorm
from daemon.layers.parameters import Scope
from daemon.layers.rope import rotate
from daemon.layers.steps import Steps
from kernels.mla import absorb_query, expand_values
from tiers.layout import Plane, SlotTensor
from tiers.pools import DevicePools

Rotation = Callable[[torch.Tensor, Rotary], torch.Tensor]
"""Rotates the leading dimensions of [rows, heads, width]."""

PAGED_CAPS = LayerCaps(
    batched_decode=True,
    verify_rows=True,
    graph_capture=True,
    no_host_stage=True,
    streaming=True,
    reads_history=True,
)


def rotate_interleaved(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotates neighbours (x0, x1), (x2, x3) ...; the result has all firsts of the pairs, then all seconds."""
    return rotate(torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1), rotary)


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes and variants of one layer."""

    hidden_size: int
    heads: int
    q_rank: int | None  # None: queries come from the hidden state at once
    latent_dim: int
    rope_dim: int  # 0: no rope part
    nope_dim: int
    value_dim: int
    scale: float  # of the scores
    norm_eps: float  # of the latents' norms
    rotation: Rotation | None

    @property
    def row_dim(self) -> int:
        """Width of a plane's row."""
        return self.latent_dim + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Width of a head's query."""
        return self.nope_dim + self.rope_dim


def dtype_name(dtype: torch.dtype) -> str:
    """As a StateLayout spells it."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class LatentQueries:
    """What the rows of a batch ask."""

    absorbed: torch.Tensor  # [rows, H, row_dim]
    low_rank: torch.Tensor  # [rows, q_rank]: the normed query before q_b, or the hidden state


class LatentProjections:
    """What dense and sparse latent attention have in common: into queries and plane rows, and out of latents.

    Reads checkpoint names q_proj, or q_a_proj, q_a_layernorm and q_b_proj, and kv_a_proj_with_mqa, kv_a_layernorm,
    kv_b_proj, o_proj of its scope.
    """

    def __init__(self, scope: Scope, layer: int, config: LatentConfig) -> None:
        self.config = config
        hidden_size, dtype = config.hidden_size, scope.parameters.dtype
        self.plane = Plane(f"layers.{layer}.latent", dtype_name(dtype), (config.row_dim,))
        self.low_rank: _LowRank | None = None
        q_name, q_in = "q_proj", hidden_size
        if config.q_rank is not None:
            self.low_rank = _LowRank(
                Linear(scope, (("q_a_proj", config.q_rank),), hidden_size),
                RmsNorm(scope, "q_a_layernorm", config.q_rank, config.norm_eps),
            )
            q_name, q_in = "q_b_proj", config.q_rank
        self.q = Linear(scope, ((q_name, config.heads * config.query_dim),), q_in)
        self.kv_a = Linear(scope, (("kv_a_proj_with_mqa", config.row_dim),), hidden_size)
        self.kv_norm = RmsNorm(scope, "kv_a_layernorm", config.latent_dim, config.norm_eps)
        head_rows = config.nope_dim + config.value_dim
        kv_b = scope.tensor("kv_b_proj.weight", config.heads * head_rows, config.latent_dim)
        heads = kv_b.view(config.heads, head_rows, config.latent_dim)
        self.w_uk = heads[:, : config.nope_dim]
        self.w_uv = heads[:, config.nope_dim :]
        self.out = Linear(scope, (("o_proj", hidden_size),), config.heads * config.value_dim)

    @property
    def active_params(self) -> int:
        """Weights that multiply each token, those absorbed into queries and outputs included."""
        products = [self.q, self.kv_a, self.out, *([] if self.low_rank is None else [self.low_rank.down])]
        return sum(p.in_size * p.out_size for p in products) + self.w_uk.numel() + self.w_uv.numel()

    @property
    def pair_flops(self) -> int:
        """FLOPs of one query token with one history token."""
        return 2 * self.config.heads * (self.config.row_dim + self.config.latent_dim)

    def project(self, hidden: torch.Tensor, inputs: Inputs, pools: DevicePools) -> LatentQueries:
        """Queries of all rows, after their own rows are written to the plane."""
        config, batch = self.config, inputs.batch
        low_rank = hidden if self.low_rank is None else self.low_rank.norm(self.low_rank.down(hidden))
        queries = self.q(low_rank).view(-1, config.heads, config.query_dim)
        nope, rope = queries[..., : config.nope_dim], queries[..., config.nope_dim :]
        compressed = self.kv_a(hidden)
        latent, key_rope = compressed[:, : config.latent_dim], compressed[:, config.latent_dim :]
        if config.rotation is not None:
            assert inputs.rotary is not None
            rope = config.rotation(rope, inputs.rotary)
            key_rope = config.rotation(key_rope[:, None], inputs.rotary)[:, 0]
        rows = torch.cat((self.kv_norm(latent), key_rope), dim=-1)
        pools.planes[self.plane.name].index_put_((batch.row_blocks, batch.row_offsets), rows)
        return LatentQueries(absorb_query(nope, rope, self.w_uk), low_rank)

    def finish(self, attended: list[torch.Tensor]) -> torch.Tensor:
        """[rows, hidden] from each sequence's attended latents [n, H, latent]."""
        return self.out(expand_values(torch.cat(attended), self.w_uv).flatten(1))


@dataclass(frozen=True, slots=True)
class _LowRank:
    """The narrow way into a query."""

    down: Linear
    norm: RmsNorm


class LatentAttention:
    """Dense: every row attends to all that came before it."""

    caps = PAGED_CAPS
    slots: tuple[SlotTensor, ...] = ()

    def __init__(self, scope: Scope, layer: int, config: LatentConfig) -> None:
        self.config = config
        self.projections = LatentProjections(scope, layer, config)
        self.planes = (self.projections.plane,)
        self.active_params = self.projections.active_params
        self.pair_flops = self.projections.pair_flops
        self._forms = scope.kernels.attention

    def forward(self, hidden: torch.Tensor, inputs: Inputs, pools: DevicePools) -> Steps:
        """[rows, hidden_size] to the same: writes the rows' latents, attends to the paged history, theirs included."""
        config = self.config
        queries = self.projections.project(hidden, inputs, pools).absorbed
        plane = pools.planes[self.projections.plane.name]
        attended: list[torch.Tensor] = []
        for rows, span in inputs.pieces:
            yield
            latents = self._forms.latent(queries[rows], plane, span, latent_dim=config.latent_dim, scale=config.scale)
            attended.append(latents)
        yield
        return self.projections.finish(attended)
