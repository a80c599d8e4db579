"""Turns the last rows of a step into tokens, each by its own sequence's parameters, penalties and draw counter."""

from collections import Counter
from dataclasses import dataclass

import torch

from daemon.engine.sequence import Sequence
from daemon.messages import Logprob, SamplingParams
from kernels.host import bools, ints
from kernels.sampling import Filters, Penalties, apply_penalties, draw, greedy, uniform


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sequence's next token, with log-probabilities where asked for; None where its logits were not finite."""

    token_id: int | None
    chosen: float | None = None
    top: tuple[Logprob, ...] = ()


class Sampler:
    """Stateless but for the end tokens that min_tokens holds back."""

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self.eos_token_ids = eos_token_ids

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[Drawn]:
        """One token for each row of logits [num_rows, vocab_size] fp32; row i belongs to sequences[i]."""
        finite = bools(logits.isfinite().all(-1))
        best = ints(greedy(logits))
        return [
            self._sample_row(logits[row], sequence, best[row]) if finite[row] else Drawn(None)
            for row, sequence in enumerate(sequences)
        ]

    def _sample_row(self, raw: torch.Tensor, sequence: Sequence, best: int) -> Drawn:
        params = sequence.request.submit.sampling
        changed = self._changed(raw, sequence)
        filters = _filters(params)
        if filters.is_greedy and changed is raw:
            token_id = best
        else:
            number = uniform((params.seed + sequence.index) % (1 << 64), sequence.num_generated)
            token_id = draw(changed, filters, number)
        if not params.logprobs:
            return Drawn(token_id)
        log_probs = torch.log_softmax(raw, -1)
        top: tuple[Logprob, ...] = ()
        if params.top_logprobs:
            values, ids = torch.topk(log_probs, min(params.top_logprobs, log_probs.numel()))
            top = tuple(Logprob(int(id_), float(value)) for id_, value in zip(ids, values, strict=True))
        return Drawn(token_id, float(log_probs[token_id]), top)

    def _changed(self, raw: torch.Tensor, sequence: Sequence) -> torch.Tensor:
        """The row after penalties, bias and min_tokens; the very row where nothing applies."""
        submit = sequence.request.submit
        params = submit.sampling
        penalties = Penalties(params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        held_back = submit.min_tokens > sequence.num_generated
        if penalties.is_neutral and not params.logit_bias and not held_back:
            return raw
        row = raw.clone()
        if not penalties.is_neutral:
            made = Counter(sequence.token_ids[sequence.request.prompt_len :])
            seen = set(sequence.token_ids) if penalties.repetition != 1.0 else set[int]()
            apply_penalties(row, penalties, _ids(seen, raw), _ids(made, raw), _counts(made, raw))
        if params.logit_bias:
            row[_ids(params.logit_bias, raw)] += torch.tensor(list(params.logit_bias.values()), device=raw.device)
        if held_back:
            row[_ids({*self.eos_token_ids, *submit.stop_token_ids}, raw)] = -torch.inf
        return row


def _filters(params: SamplingParams) -> Filters:
    return Filters(params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p)


def _ids(ids: "set[int] | dict[int, float] | Counter[int]", like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(ids), dtype=torch.int64, device=like.device)


def _counts(made: Counter[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(made.values()), dtype=torch.float32, device=like.device)
