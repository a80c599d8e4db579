"""Per-layer embedding of n-grams: rows of a table on disk, gated by the residual streams, and a dilated
convolution.

The host finds out which rows the batch needs from token ids alone and has them read before the layer runs: `stage`
reads the last ids of each sequence from slot_in and writes nothing, so that it may be repeated, or made for a step that
never runs. Only `forward` writes slot_out.
"""

from dataclasses import dataclass
from math import sqrt

import torch
from torch.nn import functional

from daemon.batch import Batch
from daemon.layers.caps import LayerCaps
from daemon.layers.linear import Linear
from daemon.layers.mla import dtype_name
from daemon.layers.ngram_table import Fetch, RowSource
from daemon.layers.parameters import Scope
from daemon.layers.steps import Steps
from kernels.dilated_conv import dilated_conv
from kernels.gated_residual import grouped_rms_norm
from kernels.ngram import NgramHash, first_history, next_history, ngram_rows
from tiers.layout import SlotTensor
from tiers.pools import DevicePools

PLE_CAPS = LayerCaps(
    batched_decode=True,
    verify_rows=True,
    graph_capture=False,
    no_host_stage=False,
    streaming=True,
    reads_history=True,
)


@dataclass(frozen=True, slots=True)
class PleSizes:
    """Of a layer's embedding and the streams it enters."""

    num_streams: int
    hidden: int
    embed_dim: int  # of all heads together
    conv_taps: int
    norm_eps: float


class NgramPle:
    """Adds to the streams [rows, n D] what the last tokens of each row look up."""

    caps = PLE_CAPS

    def __init__(self, scope: Scope, sizes: PleSizes, hash_: NgramHash, table: RowSource, layer: int) -> None:
        width = sizes.num_streams * sizes.hidden
        self.sizes = sizes
        self.hash = hash_
        self.table = table
        self.dilation = hash_.history_len + 1
        self.key = Linear(scope, (("key_proj", width),), sizes.embed_dim)
        self.value = Linear(scope, (("value_proj", sizes.hidden),), sizes.embed_dim)
        self.key_norm = scope.tensor("norm_key.weight", width)
        self.query_norm = scope.tensor("norm_query.weight", width)
        self.conv_norm = scope.tensor("norm_conv.weight", width)
        conv = scope.tensor("conv1d.weight", width, 1, sizes.conv_taps)
        self.conv = conv[:, 0]
        past_shape = ((sizes.conv_taps - 1) * self.dilation, width)
        self.history = SlotTensor(f"layers.{layer}.ngram_ids", "int64", (hash_.history_len,))
        self.conv_past = SlotTensor(f"layers.{layer}.ple_conv", dtype_name(scope.parameters.dtype), past_shape)

    @property
    def slots(self) -> tuple[SlotTensor, ...]:
        return self.history, self.conv_past

    def stage(self, batch: Batch, pools: DevicePools) -> Fetch:
        """Begins to read the rows of the table that this batch needs: [rows, heads, dim] once finished."""
        return self.table.start(self._table_rows(batch, self._histories(batch, pools)))

    def wait(self, fetch: Fetch) -> None:
        """Returns once the rows are there; raises HostStageError where they cannot be had."""
        self.table.wait(fetch)

    @property
    def active_params(self) -> int:
        """Weights that multiply each token."""
        return self.key.in_size * self.key.out_size + self.value.in_size * self.value.out_size

    def prefetch(self, earlier_ids: list[int], token_ids: list[int]) -> None:
        """Begins to read what these tokens will look up, after others of the same sequence."""
        history_len = self.hash.history_len
        padded = [self.hash.eos_id] * history_len + earlier_ids[-history_len:]
        rows = ngram_rows(torch.tensor([padded[-history_len:]]), torch.tensor([token_ids]), self.hash)
        self.table.prefetch(rows)

    def forward(self, streams: torch.Tensor, fetch: Fetch, batch: Batch, pools: DevicePools) -> Steps:
        """The streams with their share added; advances the ids and the convolution's past."""
        yield
        rows = self.table.finish(fetch).flatten(1).to(device=streams.device, dtype=streams.dtype)
        gated = self._gated(streams, rows)
        return streams + (gated + self._advance(self._norm(gated, self.conv_norm), batch, pools))

    def _advance(self, normed: torch.Tensor, batch: Batch, pools: DevicePools) -> torch.Tensor:
        """The convolution's share; its past and the last ids move on, row by row where a batch verifies."""
        if batch.row_slots is None:
            out = self._convolve(normed, batch, pools)
            self._advance_ids(batch, pools)
            return out
        out = torch.empty_like(normed)
        for rows, step in batch.row_steps():
            out[rows] = self._advance(normed[rows], step, pools)
        return out

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return grouped_rms_norm(x, weight, self.sizes.num_streams, self.sizes.norm_eps)

    def _gated(self, streams: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        sizes = self.sizes
        shape = (-1, sizes.num_streams, sizes.hidden)
        keys = self._norm(self.key(rows), self.key_norm).view(shape)
        queries = self._norm(streams, self.query_norm).view(shape)
        dots = (keys * queries).sum(dim=-1, keepdim=True) / sqrt(sizes.hidden)
        gate = dots.abs().clamp_min(1e-6).sqrt() * dots.sign()
        return (torch.sigmoid(gate) * self.value(rows)[:, None, :]).flatten(1)

    def _convolve(self, normed: torch.Tensor, batch: Batch, pools: DevicePools) -> torch.Tensor:
        pasts = pools.slot_tensors[self.conv_past.name]
        outs: list[torch.Tensor] = []
        for s in range(batch.num_seqs):
            rows = slice(batch.cu_rows[s], batch.cu_rows[s + 1])
            past = pasts.index_select(0, batch.slot_in[s : s + 1])[0]
            result = dilated_conv(past, normed[rows], self.conv, self.dilation)
            pasts.index_copy_(0, batch.slot_out[s : s + 1], result.past[None])
            outs.append(functional.silu(result.out))
        return torch.cat(outs)

    def _histories(self, batch: Batch, pools: DevicePools) -> torch.Tensor:
        """[num_seqs, n - 1] on the host; a sequence's first rows have none."""
        kept = pools.slot_tensors[self.history.name].index_select(0, batch.slot_in).cpu()
        fresh = torch.tensor([start == 0 for start in batch.starts])[:, None]
        return torch.where(fresh, first_history(batch.num_seqs, self.hash), kept)

    def _table_rows(self, batch: Batch, histories: torch.Tensor) -> torch.Tensor:
        tokens = batch.token_ids.cpu()
        if batch.is_decode:
            return ngram_rows(histories, tokens[:, None], self.hash)[:, 0]
        parts: list[torch.Tensor] = []
        for s in range(batch.num_seqs):
            own = tokens[None, batch.cu_rows[s] : batch.cu_rows[s + 1]]
            parts.append(ngram_rows(histories[s : s + 1], own, self.hash)[0])
        return torch.cat(parts)

    def _advance_ids(self, batch: Batch, pools: DevicePools) -> None:
        kept = pools.slot_tensors[self.history.name]
        histories = self._histories(batch, pools).to(kept.device)
        for s in range(batch.num_seqs):
            own = batch.token_ids[None, batch.cu_rows[s] : batch.cu_rows[s + 1]]
            kept.index_copy_(0, batch.slot_out[s : s + 1], next_history(histories[s : s + 1], own))
