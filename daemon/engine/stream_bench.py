"""Times a context of which the device holds a share and the host the rest, at real widths: a chunk and rows at its end.

What lies in the blocks is made up: a forward reads as much of it as of a real history.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import cast

import torch

from daemon.batch import SequenceRows, make_batch
from daemon.engine.restore_bench import link_bytes_per_s
from daemon.models.base import Model
from kernels.dispatch import choose_kernels
from tiers.pools import DevicePools, HostArena
from tiers.residency import BlockSpace, StreamStats
from tiers.staged import StagedPools, Stager
from tiers.streamed import Sources

FIRST_TOKEN = 5
NUM_ROWS, NUM_CHUNKS = 5, 3  # of which the first is not counted: it makes the buffers


def time_stream(
    model: Model, make_pools: Callable[[int], DevicePools], *, context_len: int, percent: int, grid: int
) -> dict[str, object]:
    """Seconds of the last chunk of a prompt and of a row behind it, beside what the link allows.

    Args:
        make_pools: pools of so many blocks, from 1 on, filled; slot 2 is the sequence's.
        percent: of the context on the device, beside its last two grid chunks.
    """
    device = model.facts.device
    block_size = make_pools(1).layout.block_size
    num_blocks, num_tail = -(-(context_len + grid) // block_size), 2 * grid // block_size
    num_head = num_blocks * percent // 100
    pools = make_pools(num_head + num_tail)
    arena = HostArena(num_blocks - num_head - num_tail, pools.layout.block_bytes, is_pinned=True)
    sample = pools.blocks[1 : 1 + num_tail].cpu()
    num_chunks = arena.chunks.shape[0]
    for first in range(0, num_chunks, num_tail):
        arena.chunks[first : first + num_tail] = sample[: num_chunks - first]
    space = BlockSpace(pools.num_blocks, pools.num_blocks + num_chunks)
    sources = Sources(space, pools, arena.planes(pools.layout), None, pools.layout.block_parts)
    move_rows = choose_kernels(device, model.facts.dtype).move_rows
    assert move_rows is not None, "this form knows its own memory alone"
    stager = Stager(sources, move_rows)
    resident = list(range(1, pools.num_blocks))
    host = list(range(space.first_host, space.first_spill))
    table = [*resident[:num_head], *host, *resident[num_head:]]

    def forward(start: int, end: int) -> tuple[float, StreamStats]:
        began = time.perf_counter()
        needed = table[: -(-end // block_size)]
        staged = StagedPools(stager, needed, start // block_size)
        rows = SequenceRows([FIRST_TOKEN] * (end - start), start, list(range(len(needed))), 2, 2)
        batch = make_batch([rows], block_size, device)
        for _ in model.forward(batch, cast(DevicePools, staged)):
            pass
        staged.finish()
        torch.cuda.synchronize()
        return time.perf_counter() - began, staged.stats

    chunks = [forward(context_len - grid, context_len) for _ in range(NUM_CHUNKS)][1:]
    rows = [forward(context_len + n, context_len + n + 1) for n in range(NUM_ROWS)][1:]
    way_bytes_per_s = link_bytes_per_s(arena.chunks.view(-1)[: 1 << 30])
    chunk_s, row_s = median(took_s for took_s, _ in chunks), median(took_s for took_s, _ in rows)
    streamed = rows[0][1]
    return {
        "context_tokens": context_len,
        "percent_resident": percent,
        "pool_bytes": pools.num_bytes,
        "buffer_bytes": sum(buffer.memory.nbytes for buffer in stager.buffers),
        "host_bytes": arena.chunks.nbytes,
        "streamed_bytes": streamed.num_bytes,  # of a row; a chunk streams as much
        "link_bytes_per_s": way_bytes_per_s,
        "copying_s": streamed.elapsed_s,
        "limit_s": streamed.num_bytes / way_bytes_per_s,
        "step_ms": 1e3 * row_s,
        "of_limit": row_s * way_bytes_per_s / streamed.num_bytes,
        "chunk_s": chunk_s,
        "chunk_of_limit": chunk_s * way_bytes_per_s / streamed.num_bytes,
        "chunk_tokens_per_s": grid / chunk_s,
        "tokens_per_s": 1 / row_s,
    }
