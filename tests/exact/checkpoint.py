"""A tiny checkpoint on disk, with weights as a seed gives them: for tests that change one value of a file."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from daemon.layers.parameters import Parameters
from daemon.models.base import BuildOptions
from daemon.models.fields import Fields
from daemon.models.load import build_model
from daemon.weights.dummy import fill_with_dummies
from tests.exact.families import FOLDER, GRID

WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"


def write_checkpoint(family: str, folder: Path, **changes: object) -> Path:
    """A model folder with real weight files in float32, and something for a tokenizer."""
    folder.mkdir(parents=True)
    values = {**json.loads((FOLDER / f"{family}.json").read_text(encoding="utf-8")), **changes}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / TOKENIZER).write_text("{}")
    parameters = Parameters(torch.device("cpu"), torch.float32)
    build_model(Fields(values), BuildOptions(torch.float32, torch.device("cpu"), GRID, None), parameters)
    fill_with_dummies(parameters, 0, lambda done_bytes, total_bytes: None)
    tensors = {
        name: target.view.reshape(target.shape).clone(memory_format=torch.contiguous_format)
        for name, target in parameters.targets.items()
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def change_one_value(folder: Path) -> None:
    """The last bit of one value of one tensor is another."""
    tensors = load_file(folder / WEIGHTS)
    name = sorted(tensors)[0]
    tensors[name].view(torch.int32).view(-1)[0] ^= 1
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
