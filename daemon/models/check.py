"""What a folder's model would need, from config.json and the headers of its weights alone: no tensor is allocated.

As a program (`python -m daemon.models.check FOLDER`) it prints one JSON object, or one line of error and exit status 1.
"""

import argparse
import sys
from pathlib import Path

import msgspec
import torch

from daemon.config import EngineConfig
from daemon.layers.parameters import Parameters
from daemon.models.base import BuildOptions, Model
from daemon.models.fields import read_json
from daemon.models.load import build_model, checkpoint_dtype, choose_tile
from daemon.sizing import RESERVED_BLOCKS, divide, free_budget
from daemon.weights.errors import LoadError
from daemon.weights.reader import INDEX_NAME, SINGLE_NAME, match_weights
from tiers.layout import StateLayout

GRID = 1024  # tokens; what a CPU takes, and a quarter of what a GPU does
CONTEXTS = (4096, 32768, 131072, 1 << 20)  # tokens


class ContextFit(msgspec.Struct, frozen=True):
    """How many sequences of one length have room at a time."""

    context_tokens: int
    num_sequences: int


class Budget(msgspec.Struct, frozen=True):
    """What a budget of bytes holds. `problem` says why it holds nothing, and then the counts are 0."""

    pool_bytes: int
    max_sequences: int
    num_blocks: int
    num_slots: int
    num_tokens: int  # of all sequences and cached prefixes together
    fits: tuple[ContextFit, ...]
    problem: str | None


class Weights(msgspec.Struct, frozen=True):
    """What the headers of the files say; every name and shape was compared with the configuration's."""

    num_files: int
    num_tensors: int
    file_bytes: int  # of the tensors that the model takes


class Report(msgspec.Struct, frozen=True):
    """All that is known of a model without loading it."""

    family: str
    num_parameters: int
    weight_bytes: int  # in memory
    dtype: str
    max_context_tokens: int
    num_planes: int
    num_slot_tensors: int
    bytes_per_token: int
    slot_payload_bytes: int  # fixed bytes of a sequence, padding excluded
    slot_bytes: int  # and included
    block_size: int
    block_bytes: int
    budget: Budget
    weights: Weights | None  # None where the folder has no weights


def check_model(
    folder: Path, *, pool_bytes: int | None = None, max_sequences: int | None = None, block_size: int | None = None
) -> Report:
    """Reads the configuration, and the headers of the weights where there are any.

    Raises:
        LoadError: the folder cannot be served, weights or not.
    """
    if not folder.is_dir():
        raise LoadError("the model path is not a folder")
    defaults = EngineConfig(str(folder))
    size = block_size or defaults.block_size
    fields = read_json(folder / "config.json")
    has_weights = any((folder / name).is_file() for name in (INDEX_NAME, SINGLE_NAME))
    dtype = checkpoint_dtype(fields)
    options = BuildOptions(dtype, torch.device("meta"), choose_tile(GRID, size), folder if has_weights else None)
    parameters = Parameters(options.device, dtype)
    model = build_model(fields, options, parameters)
    try:
        layout = model.layout(size)
        layout.check_grid(max(GRID, size))
    except ValueError as error:
        raise LoadError(str(error)) from None
    return Report(
        family=model.facts.family,
        num_parameters=model.facts.num_parameters,
        weight_bytes=model.facts.weight_bytes,
        dtype=str(dtype).removeprefix("torch."),
        max_context_tokens=model.facts.max_context_tokens,
        num_planes=len(layout.planes),
        num_slot_tensors=len(layout.slots),
        bytes_per_token=layout.bytes_per_token,
        slot_payload_bytes=sum(part.num_bytes for part in layout.slot_parts),
        slot_bytes=layout.slot_bytes,
        block_size=size,
        block_bytes=layout.block_bytes,
        budget=_budget(model, layout, pool_bytes, max_sequences or defaults.max_sequences),
        weights=_weights(folder, parameters) if has_weights else None,
    )


def main() -> int:
    """The program; see the module."""
    parser = argparse.ArgumentParser(prog="daemon.models.check")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pool-bytes", type=int)
    parser.add_argument("--max-sequences", type=int)
    arguments = parser.parse_args()
    try:
        report = check_model(arguments.folder, pool_bytes=arguments.pool_bytes, max_sequences=arguments.max_sequences)
    except LoadError as error:
        print(error, file=sys.stderr)
        return 1
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    return 0


def _budget(model: Model, layout: StateLayout, pool_bytes: int | None, max_sequences: int) -> Budget:
    budget = pool_bytes or free_budget(torch.device("cpu"), model.facts.weight_bytes)
    if budget == 0:
        problem = f"the weights alone need {model.facts.weight_bytes} bytes, more than this machine has free"
        return Budget(0, max_sequences, 0, 0, 0, (), problem)
    try:
        division = divide(budget, layout, max_sequences=max_sequences, grid=max(GRID, layout.block_size))
    except ValueError as error:
        return Budget(budget, max_sequences, 0, 0, 0, (), str(error))
    usable = division.num_blocks - RESERVED_BLOCKS
    longest = model.facts.max_context_tokens
    lengths = sorted({length for length in CONTEXTS if length < longest} | {longest})
    fits = tuple(ContextFit(n, min(max_sequences, usable // -(-n // layout.block_size))) for n in lengths)
    return Budget(
        budget, max_sequences, division.num_blocks, division.num_slots, usable * layout.block_size, fits, None
    )


def _weights(folder: Path, parameters: Parameters) -> Weights:
    shards = match_weights(folder, parameters)
    entries = [entry for shard in shards for entry in shard.entries]
    return Weights(len(shards), len(entries), sum(entry.num_bytes for entry in entries))


if __name__ == "__main__":
    sys.exit(main())
