"""Pairs of models that parity tests share, each made once a module, on one thread."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.parity.checkpoints import Pair
from tests.parity.matrix import stable_topk
from tests.parity.sparse_checkpoints import make_pair


@pytest.fixture(scope="module")
def sparse_pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pair]]:
    """Pairs of the selecting families by name, on one thread, with ties broken alike on both sides."""
    made: dict[str, Pair] = {}

    def get(name: str, change: Callable[[PreTrainedModel], None] | None = None) -> Pair:
        key = name if change is None else f"{name}, {change.__name__}"
        if key not in made:
            folder: Path = tmp_path_factory.mktemp("model")
            made[key] = make_pair(name, folder, change)
        return made[key]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with stable_topk():
        yield get
    torch.set_num_threads(threads)
