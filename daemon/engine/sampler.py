"""Turns the last rows of a step into tokens, each by its sequence's grammar, parameters, penalties and draw counter.

A grammar comes first: what it forbids is -inf before penalties and filters see the row, and log-probabilities are those
among what it allows. It also has the last word: min_tokens and an ignored end token hold ends back only while something
else is allowed.
"""

from dataclasses import dataclass

import torch

from daemon.engine.captured import Draw
from daemon.engine.decode_step import Decoded
from daemon.engine.grammar_matchers import Matchers
from daemon.engine.sequence import Sequence
from daemon.engine.token_counts import Counted
from daemon.errors import ErrorReason
from daemon.grammar import GrammarError
from daemon.messages import Logprob, SamplingParams
from kernels import sampling_rows
from kernels.host import bools, ints
from kernels.sampling import Filters, Penalties, all_finite, apply_penalties, draw, greedy, uniform


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a request cannot go on, fit for its client to read."""

    reason: ErrorReason
    message: str


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sequence's next token, with log-probabilities where asked for; None where a fault ends its request."""

    token_id: int | None
    chosen: float | None = None
    top: tuple[Logprob, ...] = ()
    ends: bool = False  # the grammar's end: nothing holds that back
    fault: Fault | None = None


NOT_FINITE = Drawn(None, fault=Fault(ErrorReason.INTERNAL, "the model's logits are not finite"))


class Sampler:
    """Knows the end tokens that min_tokens holds back, and where each structured answer is in its grammar."""

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self.eos_token_ids = eos_token_ids
        self.matchers = Matchers(eos_token_ids)
        self._counted = Counted()

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[Drawn]:
        """One token for each row of logits [num_rows, vocab_size] fp32; row i belongs to sequences[i]."""
        finite = bools(all_finite(logits))
        masked = self.matchers.mask(logits, sequences)
        best = ints(greedy(masked.logits))
        drawn: list[Drawn] = []
        for row, sequence in enumerate(sequences):
            if not finite[row]:
                drawn.append(NOT_FINITE)
            elif row in masked.faults:
                drawn.append(_lost(masked.faults[row]))
            else:
                drawn.append(self._sample_row(masked.logits[row], sequence, best[row]))
        return drawn

    def draw_of(self, sequence: Sequence, ahead: int = 0) -> Draw | None:
        """How the row so many tokens `ahead` is drawn where its logits are; None where the host must see them."""
        params = sequence.request.submit.sampling
        penalties = Penalties(params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        is_plain = penalties.is_neutral and not params.logit_bias and not params.logprobs and params.typical_p == 1.0
        if not is_plain or _has_grammar(sequence) or self._held_back(sequence, ahead):
            return None
        number = 0.5 if params.temperature == 0.0 else _number(sequence, ahead)
        return Draw(params.temperature, params.top_k, params.top_p, params.min_p, number)

    def sample_decoded(self, decoded: Decoded, rows: list[int], sequences: list[Sequence]) -> list[Drawn]:
        """A token for each of these rows of a step, sequences[i] the owner of rows[i]; some are drawn already."""
        tokens = [decoded.tokens[row] for row in rows]
        by_host = [i for i, token in enumerate(tokens) if token is None]
        drawn = [NOT_FINITE if token == sampling_rows.NOT_FINITE else Drawn(token) for token in tokens]
        if by_host:
            host_rows = [rows[i] for i in by_host]
            logits = decoded.logits if len(host_rows) == len(decoded.tokens) else decoded.logits[host_rows]
            for i, token in zip(by_host, self.sample(logits, [sequences[i] for i in by_host]), strict=True):
                drawn[i] = token
        return drawn

    def _sample_row(self, raw: torch.Tensor, sequence: Sequence, best: int) -> Drawn:
        params = sequence.request.submit.sampling
        changed = self._changed(raw, sequence)
        filters = _filters(params)
        if filters.is_greedy and changed is raw:
            token_id = best
        else:
            number = _number(sequence)
            token_id = (
                _draw_among(changed, filters, number) if _has_grammar(sequence) else draw(changed, filters, number)
            )
        ends = False
        if _has_grammar(sequence):
            try:
                ends = self.matchers.advance(sequence, token_id)
            except GrammarError as error:
                return _lost(str(error))
        if not params.logprobs:
            return Drawn(token_id, ends=ends)
        log_probs = torch.log_softmax(raw, -1)
        top: tuple[Logprob, ...] = ()
        if params.top_logprobs:
            values, ids = torch.topk(log_probs, min(params.top_logprobs, log_probs.numel()))
            pairs = zip(ids, values, strict=True)
            top = tuple(Logprob(int(id_), float(value)) for id_, value in pairs if value > -torch.inf)
        return Drawn(token_id, float(log_probs[token_id]), top, ends)

    def _changed(self, raw: torch.Tensor, sequence: Sequence) -> torch.Tensor:
        """The row after penalties, bias and what is held back; the very row where nothing applies."""
        params = sequence.request.submit.sampling
        penalties = Penalties(params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        held_back = self._held_back(sequence)
        if penalties.is_neutral and not params.logit_bias and not held_back:
            return raw
        row = raw.clone()
        if not penalties.is_neutral:
            counts = self._counted.of(sequence, raw.device, with_prompt=penalties.repetition != 1.0)
            apply_penalties(row, penalties, counts.seen, counts.made, counts.made_counts)
        if params.logit_bias:
            row[_ids(params.logit_bias, raw)] += torch.tensor(list(params.logit_bias.values()), device=raw.device)
        if held_back:
            ids = _ids(held_back, raw)
            ends = row[ids]
            row[ids] = -torch.inf
            if _has_grammar(sequence) and bool(row.amax() == -torch.inf):
                row[ids] = ends
        return row

    def _held_back(self, sequence: Sequence, ahead: int = 0) -> set[int]:
        """Tokens that must not come now: all ends before min_tokens, and in a grammar an end token that is ignored."""
        submit = sequence.request.submit
        if submit.min_tokens > sequence.num_generated + ahead:
            return {*self.eos_token_ids, *submit.stop_token_ids}
        return set(self.eos_token_ids).difference(submit.stop_token_ids) if _has_grammar(sequence) else set()


def _number(sequence: Sequence, ahead: int = 0) -> float:
    seed = sequence.request.submit.sampling.seed
    return uniform((seed + sequence.index) % (1 << 64), sequence.num_generated + ahead)


def _has_grammar(sequence: Sequence) -> bool:
    return sequence.request.grammar is not None


def _draw_among(row: torch.Tensor, filters: Filters, number: float) -> int:
    """As `draw`, of a row that may allow few: where filters sort, the others are left out first."""
    if filters.is_plain or filters.is_greedy:
        return draw(row, filters, number)
    ids = (row > -torch.inf).nonzero().squeeze(-1)
    return int(ids[draw(row[ids], filters, number)])


def _lost(why: str) -> Drawn:
    return Drawn(None, fault=Fault(ErrorReason.TOO_LARGE, f"the structure cannot be followed any further: {why}"))


def _filters(params: SamplingParams) -> Filters:
    return Filters(params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p)


def _ids(ids: "set[int] | dict[int, float]", like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(ids), dtype=torch.int64, device=like.device)
