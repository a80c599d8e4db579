"""A model that exists in no paper: a decaying state, an attended history, and pools of four tokens.

Its planes and slots are unlike those of any family, so an engine and tiers that serve it exactly know no family. Each
row is computed by itself with operations whose shapes depend on its position alone: bytes never depend on the batch,
on chunks or on block ids, and every answer can be predicted by `oracle` without an engine.
"""

from collections.abc import Sequence

import torch

from daemon.batch import Batch, SequenceRows, make_batch
from daemon.layers.caps import LayerCaps
from daemon.models.base import Compute, ModelFacts, Steps, finish
from kernels.sampling import Filters, draw, uniform
from tiers.layout import Plane, SlotTensor, StateLayout
from tiers.pools import DevicePools

VOCAB, DIM = 61, 8
EOS = 2


class Invented:
    """Weights from a seed; `pause_every` rows it lets the engine in."""

    def __init__(self, seed: int = 0, pause_every: int = 3, max_context_tokens: int = 4096) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.embedding = torch.randn(VOCAB, DIM, generator=generator)
        self.head = torch.randn(VOCAB, DIM, generator=generator) * 3
        self.pause_every = pause_every
        self.caps = LayerCaps(
            batched_decode=True,
            verify_rows=True,
            graph_capture=False,
            no_host_stage=True,
            streaming=True,
            reads_history=True,
        )
        self.compute = Compute(matmul_params=2 * VOCAB * DIM, pair_flops=4 * DIM)
        self.facts = ModelFacts(
            family="invented",
            vocab_size=VOCAB,
            max_context_tokens=max_context_tokens,
            eos_token_ids=(EOS,),
            num_parameters=2 * VOCAB * DIM,
            weight_bytes=8 * VOCAB * DIM,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )

    def layout(self, block_size: int) -> StateLayout:
        return StateLayout(
            planes=(Plane("history", "float32", (DIM,)), Plane("pools", "float32", (2, DIM // 2), tokens_per_row=4)),
            slots=(SlotTensor("decayed", "float32", (DIM,)), SlotTensor("pool", "float32", (DIM,))),
            block_size=block_size,
        )

    def forward(self, batch: Batch, pools: DevicePools) -> Steps:
        logits: list[torch.Tensor] = []
        wanted = set(batch.logit_rows.tolist())
        for s in range(batch.num_seqs):
            decayed = pools.slot_tensors["decayed"][batch.slot_in[s]].clone()
            pool = pools.slot_tensors["pool"][batch.slot_in[s]].clone()
            for row in range(batch.cu_rows[s], batch.cu_rows[s + 1]):
                position = int(batch.positions[row])
                block, offset = batch.row_blocks[row], int(batch.row_offsets[row])
                embedded = self.embedding[batch.token_ids[row]]
                decayed = decayed * 0.75 + embedded
                pool = pool + embedded if position % 4 else embedded.clone()
                pools.planes["history"][block, offset] = embedded * (1 + position % 7)
                if position % 4 == 3:
                    pools.planes["pools"][block, offset // 4] = pool.view(2, DIM // 2)
                if row in wanted:
                    logits.append(self._logits(pools, batch.block_tables[s], position, decayed))
                if (row + 1) % self.pause_every == 0:
                    yield
            pools.slot_tensors["decayed"][batch.slot_out[s]] = decayed
            pools.slot_tensors["pool"][batch.slot_out[s]] = pool
        return torch.stack(logits)

    def _logits(self, pools: DevicePools, table: torch.Tensor, position: int, decayed: torch.Tensor) -> torch.Tensor:
        history = pools.planes["history"].index_select(0, table).flatten(0, 1)[: position + 1]
        weights = torch.softmax(history @ decayed * 0.2, 0)
        mixed = decayed + weights @ history
        pooled = pools.planes["pools"].index_select(0, table).flatten(0, 1)[: (position + 1) // 4]
        if len(pooled):
            mixed = mixed + pooled.flatten(1).sum(0).tanh()
        return self.head @ mixed.tanh()


class Oracle:
    """Answers without an engine: one sequence in pools of its own, row by row."""

    def __init__(self, model: Invented, block_size: int) -> None:
        self.model = model
        self.block_size = block_size

    def answer(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        seed: int = 0,
        temperature: float = 0.0,
        stop_at_eos: bool = True,
    ) -> list[int]:
        """The tokens that any correct serving of this prompt gives."""
        total = len(prompt) + max_tokens
        num_blocks = -(-total // self.block_size)
        pools = DevicePools(self.model.layout(self.block_size), num_blocks, 1, torch.device("cpu"))
        tokens, computed = list(prompt), 0
        while len(tokens) < total:
            rows = SequenceRows(tokens[computed:], computed, list(range(num_blocks)), slot_in=0, slot_out=0)
            batch = make_batch([rows], self.block_size, torch.device("cpu"))
            logits = finish(self.model.forward(batch, pools))[0]
            number = uniform(seed, len(tokens) - len(prompt))
            computed = len(tokens)
            tokens.append(draw(logits, Filters(temperature=temperature), number))
            if stop_at_eos and tokens[-1] == EOS:
                break
        return tokens[len(prompt) :]
