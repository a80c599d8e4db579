"""The draws of a whole step: every row's filters and number as tensors, and torch's form of drawing by them."""

from dataclasses import dataclass

import torch

from kernels.sampling import Filters, draw

NOT_FINITE = -1  # in place of a token: the row's logits are not numbers


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Every row's filters and number, on the device; neutral values switch a filter off, as in `Filters`."""

    temperature: torch.Tensor  # [rows] float32; 0 is greedy
    top_k: torch.Tensor  # [rows] int32
    top_p: torch.Tensor  # [rows] float64
    min_p: torch.Tensor  # [rows] float64
    number: torch.Tensor  # [rows] float64 in (0, 1)

    def check(self, num_rows: int) -> None:
        """Asserts shapes and dtypes."""
        for value, dtype in (
            (self.temperature, torch.float32),
            (self.top_k, torch.int32),
            (self.top_p, torch.float64),
            (self.min_p, torch.float64),
            (self.number, torch.float64),
        ):
            assert value.shape == (num_rows,)
            assert value.dtype == dtype
            assert value.is_contiguous()


def draw_rows(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """A token of each row of logits [rows, vocab], NOT_FINITE where one is no finite number: [rows] int64."""
    rows.check(logits.shape[0])
    tokens: list[int] = []
    for r in range(logits.shape[0]):
        filters = Filters(
            temperature=float(rows.temperature[r]),
            top_k=int(rows.top_k[r]),
            top_p=float(rows.top_p[r]),
            min_p=float(rows.min_p[r]),
        )
        is_finite = bool(logits[r].isfinite().all())
        tokens.append(draw(logits[r].float(), filters, float(rows.number[r])) if is_finite else NOT_FINITE)
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)
