"""A stack of pre-norm layers between a token embedding and logits: the frame that plain decoders share."""

from dataclasses import dataclass
from typing import Protocol

import torch

from daemon.batch import Batch
from daemon.layers.caps import LayerCaps, combine
from daemon.layers.inputs import InputForm, make_inputs
from daemon.layers.linear import Embedding, Linear
from daemon.layers.mixing import Mixer, mix
from daemon.layers.norms import RmsNorm
from daemon.layers.rope import Rope
from daemon.layers.steps import Steps
from tiers.pools import DevicePools


class Mlp(Protocol):
    """The part of a layer that looks at one row at a time."""

    @property
    def active_params(self) -> int:
        """Weights that multiply each token."""
        ...

    def forward(self, hidden: torch.Tensor) -> Steps:
        """[num_rows, hidden_size] to the same."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """h += mixer(norm(h)); h += mlp(norm(h))."""

    mixer_norm: RmsNorm
    mixer: Mixer
    mlp_norm: RmsNorm
    mlp: Mlp


def last_rows(norm: RmsNorm, hidden: torch.Tensor, out: torch.Tensor | None, batch: Batch) -> torch.Tensor:
    """The norm of hidden + out, which the last layer gave, at the rows whose logits are asked for."""
    assert out is not None, "there are layers"
    if batch.logit_rows.shape[0] < hidden.shape[0]:
        hidden, out = (rows.index_select(0, batch.logit_rows) for rows in (hidden, out))
    return norm.added(hidden, out)


@dataclass(frozen=True, slots=True)
class Decoder:
    """Embedding, layers, last norm, head. `head` is None where the embedding's matrix also makes the logits."""

    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: RmsNorm
    head: Linear | None
    rope: Rope | None
    form: InputForm

    @property
    def caps(self) -> LayerCaps:
        return combine([layer.mixer.caps for layer in self.layers])

    def forward(self, batch: Batch, pools: DevicePools) -> Steps:
        """Logits [len(batch.logit_rows), vocab_size] in float32."""
        hidden = self.embedding(batch.token_ids)
        rotary = None if self.rope is None else self.rope.rows(batch.positions, hidden.dtype)
        inputs = make_inputs(batch, pools.layout.block_size, self.form, rotary)
        out: torch.Tensor | None = None  # of the layer before, not added yet
        for layer in self.layers:
            mixed = yield from mix(layer.mixer, layer.mixer_norm.added(hidden, out), inputs, pools)
            normed = layer.mlp_norm.added(hidden, mixed)
            yield
            out = yield from layer.mlp.forward(normed)
            yield
        last = last_rows(self.norm, hidden, out, batch)
        return (self.embedding.logits(last) if self.head is None else self.head(last)).float()
