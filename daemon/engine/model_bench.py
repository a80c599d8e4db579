"""Times one model at its real shapes, weights made up: `python -m daemon.engine.model_bench CONFIG PART...`

A part is `decode:ROWS:CONTEXT`, `eager:ROWS:CONTEXT`, `prefill:CONTEXT`, `stream:CONTEXT:PERCENT` (so much of it on the
device, the rest in host memory) or `restore:TIER:CONTEXT`; each prints one JSON object. The history of a step is made
up as well: it reads as many pages as a real one, and nobody has to compute them.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from daemon.batch import SequenceRows, make_batch
from daemon.engine.captured import LAST, DecodeRow, Draw
from daemon.engine.decode_step import DecodeStep, Launched, takes
from daemon.engine.restore_bench import time_restore
from daemon.engine.stream_bench import time_stream
from daemon.layers.parameters import Parameters
from daemon.models.base import BuildOptions, HostStaged, Model
from daemon.models.load import build_model, choose_tile, read_shape
from daemon.weights.dummy import fill_with_dummies
from kernels.host import ints
from tiers.pools import DevicePools

BLOCK, GRID = 64, 4096  # tokens
NUM_STEPS = 30
EXPERT_KEYS = ("n_routed_experts", "num_local_experts", "num_experts")


@dataclass(frozen=True, slots=True)
class Bytes:
    """Where a model's weights are, and so what a step must read of them."""

    total: int
    experts: int  # routed ones, all of them
    embedding: int  # of which a step reads a row
    share: float  # of the experts that one row reads

    def read(self, num_rows: int) -> float:
        """What a step of so many rows reads, where rows choose their experts by chance."""
        return self.total - self.experts - self.embedding + self.experts * (1 - (1 - self.share) ** num_rows)


@dataclass(frozen=True, slots=True)
class Built:
    """A model with its weights made up."""

    model: Model
    weights: Bytes
    load_s: float


def main() -> int:
    """Exit status 2 where there is no device to time."""
    parser = argparse.ArgumentParser(prog="daemon.engine.model_bench", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("parts", nargs="+")
    parser.add_argument("--layers", type=int, help="so many layers only, the first ones")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no device to time", file=sys.stderr)
        return 2
    restores = [part for part in arguments.parts if part.startswith("restore:")]
    steps = [part for part in arguments.parts if part not in restores]
    if steps:
        with torch.inference_mode():
            built = build(arguments.config, arguments.layers)
            for part in steps:
                _print(part, partial(run_part, built, part))
            del built
    for part in restores:
        _, tier, context_len = part.split(":")
        gc.collect()
        torch.cuda.empty_cache()
        _print(part, partial(time_restore, arguments.config, tier, int(context_len)))
    return 0


def _print(part: str, measure: Callable[[], dict[str, object]]) -> None:
    """One object on a line of its own; a part that fails says why in it."""
    record: dict[str, object] = {"part": part}
    try:
        record |= measure()
    except Exception as failure:  # the parts after it go on
        record["failure"] = f"{type(failure).__name__}: {failure}".splitlines()[0][:300]
    print(json.dumps(record), flush=True)
    torch.cuda.empty_cache()


def build(path: Path, num_layers: int | None) -> Built:
    """The model of a configuration on the first CUDA device, in bfloat16."""
    began = time.monotonic()
    fields, text_fields = read_shape(path, num_layers)
    text = text_fields.values
    device = torch.device("cuda", 0)
    parameters = Parameters(device, torch.bfloat16)
    options = BuildOptions(torch.bfloat16, device, choose_tile(GRID, BLOCK))
    model = build_model(fields, options, parameters)
    sizes = {name: target.view.nbytes for name, target in parameters.targets.items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    embedding = sum(size for name, size in sizes.items() if name.endswith(("embed_tokens.weight", "embeddings.weight")))
    num_experts = next((int(str(text[key])) for key in EXPERT_KEYS if key in text), 0)
    share = int(str(text["num_experts_per_tok"])) / num_experts if num_experts else 0.0
    fill_with_dummies(parameters, 0, lambda _done, _total: None)
    parameters.finish()
    torch.cuda.synchronize()
    weights = Bytes(model.facts.weight_bytes, experts, embedding, share)
    return Built(model, weights, time.monotonic() - began)


def run_part(built: Built, part: str) -> dict[str, object]:
    """Times one part; the keys say what was measured, in which unit."""
    kind, *numbers = part.split(":")
    match kind, [int(number) for number in numbers]:
        case "decode", [num_rows, context_len]:
            return time_decode(built, num_rows, context_len, captures=True)
        case "eager", [num_rows, context_len]:
            return time_decode(built, num_rows, context_len, captures=False)
        case "prefill", [context_len]:
            return time_prefill(built, context_len)
        case "stream", [context_len, percent]:
            pools = partial(_made_up_pools, built.model, num_rows=1)
            return time_stream(built.model, pools, context_len=context_len, percent=percent, grid=GRID)
        case _:
            raise ValueError(f"unknown part {part!r}")


def time_decode(built: Built, num_rows: int, context_len: int, *, captures: bool) -> dict[str, object]:
    """Steps of so many sequences that each have so many tokens behind them."""
    model = built.model
    assert takes(model), "this model's decode steps cannot be replayed"
    per_row = -(-(context_len + 2 * NUM_STEPS) // BLOCK)
    pools = _made_up_pools(model, num_rows * per_row, num_rows)
    order = ints(torch.randperm(num_rows * per_row) + 1)
    tables = [order[r * per_row : (r + 1) * per_row] for r in range(num_rows)]
    step = DecodeStep(model, pools, captures=captures)
    ids = _random_ids(model, num_rows)
    position = context_len

    def launch(token_ids: list[int]) -> Launched:
        nonlocal position
        rows = [DecodeRow(token_ids[r], position, tables[r], 2 + r, Draw()) for r in range(num_rows)]
        position += 1
        return step.launch(rows)

    for _ in range(3):
        launch(ids).wait()
    alone = _seconds(lambda: launch(ids).wait(), NUM_STEPS // 3)
    # As the engine runs them: one ahead of the host.
    flying, ends = launch(ids), list[float]()
    for _ in range(NUM_STEPS):
        following = launch([LAST] * num_rows)
        flying.wait()
        ends.append(time.perf_counter())
        flying = following
    flying.wait()
    walls = [end - begin for begin, end in pairwise(ends)]
    record: dict[str, object] = {
        "num_rows": num_rows,
        "context_tokens": context_len,
        "step_ms": 1e3 * median(walls),
        "alone_ms": 1e3 * median(alone),  # of a step that the host must see before the next
        "counts": {"replayed": step.counts.replayed, "eager": step.counts.eager},
        "tokens_per_s": num_rows / median(walls),
    }
    if captures:
        (graph,) = step.graphs()
        device_ms = _device_ms(graph.replay, NUM_STEPS)
        record |= {"device_ms": device_ms, "gap_ms": 1e3 * median(walls) - device_ms}
    layout = model.layout(BLOCK)
    slot_bytes = sum(part.num_bytes for part in layout.slot_parts)
    record |= {
        "weight_bytes_read": built.weights.read(num_rows),
        "history_bytes": layout.bytes_per_token * context_len * num_rows,
        "state_bytes": 2 * slot_bytes * num_rows,
    }
    return record


def time_prefill(built: Built, context_len: int) -> dict[str, object]:
    """A prompt of so many tokens, chunk by chunk."""
    model = built.model
    assert not isinstance(model, HostStaged)
    num_blocks = -(-context_len // BLOCK)
    pools = _made_up_pools(model, num_blocks, 1)
    table = ints(torch.randperm(num_blocks) + 1)
    ids = _random_ids(model, context_len)
    device = model.facts.device

    def prompt(length: int) -> None:
        pools.clear_slot(2)
        for start in range(0, length, GRID):
            rows = SequenceRows(ids[start : min(length, start + GRID)], start, table, 2, 2)
            for _ in model.forward(make_batch([rows], BLOCK, device), pools):
                pass

    _seconds(lambda: prompt(min(context_len, 2 * GRID)), 1)  # compiles
    seconds = _seconds(lambda: prompt(context_len), 2 if context_len <= 1 << 17 else 1)
    return {"context_tokens": context_len, "prefill_s": min(seconds), "tokens_per_s": context_len / min(seconds)}


def _random_ids(model: Model, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return ints(torch.randint(0, model.facts.vocab_size, (count,), generator=generator))


def _made_up_pools(model: Model, num_blocks: int, num_rows: int) -> DevicePools:
    """Blocks from 1 on and slots from 2 on hold small random numbers."""
    pools = DevicePools(model.layout(BLOCK), num_blocks + 1, num_rows + 2, model.facts.device)
    for view in (*pools.planes.values(), *pools.slot_tensors.values()):
        if view.dtype.is_floating_point:
            view.normal_(std=0.5)
    return pools


def _seconds(run: Callable[[], object], repeats: int) -> list[float]:
    found: list[float] = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return found


def _device_ms(run: Callable[[], object], repeats: int) -> float:
    """Of one run, back to back: no host stands between two of them."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


if __name__ == "__main__":
    sys.exit(main())
