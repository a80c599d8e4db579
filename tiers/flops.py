"""What tokens cost to compute, from a model's description of its own layers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ComputeCost:
    """FLOPs of prefill as a function of position: linear layers, attention over the history, recurrent states."""

    matmul_params: int  # weights that multiply each token; of experts only the chosen ones
    pair_flops: int  # of one query token with one token of its history, all layers together; 0 without attention
    state_flops: int = 0  # a token, of recurrent layers beside their projections; does not grow with the position

    def flops(self, start: int, end: int) -> int:
        """FLOPs of the tokens [start, end), each attending to all tokens before it and to itself.

        Layers that select from their history cost less than this at length; `pair_flops` is then their scoring.
        """
        assert 0 <= start <= end
        num_pairs = (end * (end + 1) - start * (start + 1)) // 2
        return (2 * self.matmul_params + self.state_flops) * (end - start) + self.pair_flops * num_pairs
