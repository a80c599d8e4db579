"""Where each answer is in its grammar: one matcher for each choice that draws, and the masks of a step.

A matcher is made when its choice first draws, from the grammar's start and the tokens that the choice has already: at
the fork it has none, after a preemption as many as were drawn. It is held by the sequence's Resources, and goes with
whatever else the sequence gives back.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from llguidance import LLMatcher

from daemon.engine.sequence import Sequence
from daemon.grammar import GrammarError, check_matcher
from kernels.host import bools
from kernels.token_mask import apply_token_masks, mask_words
from tiers.resources import Resources

KIND = "matcher"  # in Resources


@dataclass(frozen=True, slots=True)
class Masked:
    """Logits [num_rows, vocab_size] where what a grammar does not allow is -inf, and why a row has no next token."""

    logits: torch.Tensor
    faults: dict[int, str] = field(default_factory=dict[int, str])  # by row


class Matchers:
    """The matchers of the sequences alive, by sequence id."""

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos = frozenset(eos_token_ids)
        self._matchers: dict[str, LLMatcher] = {}

    def mask(self, logits: torch.Tensor, sequences: list[Sequence]) -> Masked:
        """The rows of sequences without a grammar as they are, to the byte; without any the very tensor."""
        rows = [row for row, sequence in enumerate(sequences) if sequence.request.grammar is not None]
        if not rows:
            return Masked(logits)
        faults: dict[int, str] = {}
        masks: dict[int, torch.Tensor] = {}
        for row in rows:
            try:
                masks[row] = self._mask_of(sequences[row])
            except GrammarError as error:
                faults[row] = str(error)
        masked = logits.clone()
        if masks:
            index = torch.tensor(list(masks), device=logits.device)
            allowed = apply_token_masks(logits[index], torch.stack(list(masks.values())).to(logits.device))
            masked[index] = allowed
            for row, has_any in zip(masks, bools(allowed.amax(-1) > -torch.inf), strict=True):
                if not has_any:
                    faults[row] = "no token of the model goes on with the structure"
        return Masked(masked, faults)

    def advance(self, sequence: Sequence, token_id: int) -> bool:
        """Takes the token that a sequence with a grammar has drawn. Returns: whether it ends the answer.

        Raises:
            GrammarError: the matcher cannot go on.
        """
        if token_id in self._eos:
            return True
        matcher = self._matchers[sequence.id]
        matcher.consume_token(token_id)
        check_matcher(matcher)
        return False

    def astray(self, owners: Iterable[Resources]) -> list[str]:
        """Matchers that no sequence holds, and held ones that do not exist, by name."""
        held = {id_ for resources in owners for id_ in resources.ids(KIND)}
        return [f"matcher of {id_}" for id_ in held ^ set(self._matchers)]

    def _mask_of(self, sequence: Sequence) -> torch.Tensor:
        """[words] int32, a bit for each token id."""
        grammar = sequence.request.grammar
        assert grammar is not None
        assert grammar.is_ready, "a prompt is not finished before its grammar"
        if grammar.built is None:
            raise GrammarError(grammar.fault or "")
        matcher = self._matchers.get(sequence.id)
        if matcher is None:
            matcher = self._make(sequence, grammar.built.start)
        mask = torch.empty(mask_words(grammar.built.vocab_size), dtype=torch.int32)
        matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
        check_matcher(matcher)
        return mask

    def _make(self, sequence: Sequence, start: LLMatcher) -> LLMatcher:
        matcher = start.deep_copy()
        matcher.consume_tokens(sequence.token_ids[sequence.request.prompt_len :])
        check_matcher(matcher)
        id_ = sequence.id
        self._matchers[id_] = matcher
        sequence.resources.hold(KIND, id_, lambda: self._forget(id_))
        return matcher

    def _forget(self, id_: str) -> None:
        del self._matchers[id_]
