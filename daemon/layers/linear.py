"""Matrix products with weights: the dense projection, and the token embedding."""

import torch
from torch.nn import functional

from daemon.layers.parameters import Scope
from kernels.dispatch import TORCH


class Linear:
    """y = x W^T + b, of one checkpoint matrix or of several that lie one below the other.

    bfloat16 weights on a CPU with bfloat16 units are brought into the order those units read, in place of the plain
    one, once they are loaded: that doubles the speed of steps with few rows. `makes_logits` says that it is only ever
    asked for few.
    """

    def __init__(
        self,
        scope: Scope,
        parts: tuple[tuple[str, int], ...],
        in_size: int,
        *,
        bias: bool = False,
        makes_logits: bool = False,
    ) -> None:
        self.in_size = in_size
        self.out_size = sum(size for _, size in parts)
        self.weight = scope.rows(((f"{name}.weight", size) for name, size in parts), in_size)
        self.bias = scope.rows((f"{name}.bias", size) for name, size in parts) if bias else None
        self._linear = scope.kernels.rows.linear
        self._few_rows = makes_logits
        self._is_packed = False
        if scope.kernels is TORCH:  # other forms read weights in their plain order
            scope.parameters.when_filled(self._pack)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, in_size] to [num_rows, out_size]."""
        if self._is_packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return self._linear(x, self.weight, self.bias)

    def _pack(self) -> None:
        if can_pack(self.weight):
            self.weight = pack(self.weight, few_rows=self._few_rows)
            self._is_packed = True


def can_pack(weight: torch.Tensor) -> bool:
    """This machine's matrix units read such a weight faster in an order of their own."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def pack(weight: torch.Tensor, *, few_rows: bool) -> torch.Tensor:
    """A weight that `can_pack` in an order of the matrix units.

    There are two, and the library chooses by the rows that it is told to expect: told of one, blocks of 64 outputs in
    place of 32. On a Xeon those are read 4 to 12% faster by up to 16 rows, and hundreds of rows take up to 30% longer.
    """
    return torch.ops.mkldnn._reorder_linear_weight(weight, 1 if few_rows else None)


class Embedding:
    """A row for each token id; where tied (`makes_logits`), the same matrix makes the logits.

    A tied matrix is read row by row in its plain order and all at once in the matrix units' own, so that a CPU with
    such units holds it in both; the second is counted among the parameters' bytes.
    """

    def __init__(
        self, scope: Scope, name: str, vocab_size: int, hidden_size: int, *, makes_logits: bool = False
    ) -> None:
        self.weight = scope.tensor(f"{name}.weight", vocab_size, hidden_size)
        self._linear = scope.kernels.rows.linear
        self._packed: torch.Tensor | None = None
        if makes_logits and scope.kernels is TORCH and can_pack(self.weight):
            scope.parameters.num_bytes += self.weight.nbytes
            scope.parameters.when_filled(self._pack)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_rows] to [num_rows, hidden_size], a new tensor."""
        return functional.embedding(token_ids, self.weight)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] to [num_rows, vocab_size]."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
        return self._linear(x, self.weight, None)

    def _pack(self) -> None:
        self._packed = pack(self.weight, few_rows=True)
