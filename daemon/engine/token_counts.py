"""The tokens that penalties look at: a prompt's once for all its choices, an answer's as it grows.

What must hold: a draw reads the tokens that have come since the last one, and never the whole context again.
"""

from collections.abc import Sequence as Many
from weakref import WeakKeyDictionary

import torch

from daemon.engine.sequence import Request, Sequence


class PromptTokens:
    """The ids of a prompt, each once. Its choices share them."""

    def __init__(self, prompt_ids: Many[int], device: torch.device) -> None:
        self.known = frozenset(prompt_ids)
        self.ids = torch.tensor(list(self.known), dtype=torch.int64, device=device)  # [num_known]


class TokenCounts:
    """What one sequence has. Its token ids only ever grow, so each is counted once.

    Attributes:
        seen: [num_seen] int64, unique ids of the answer and, where it is given, the prompt.
        made: [num_made] int64, unique ids of the answer.
        made_counts: [num_made] float32, how often each was made.
    """

    def __init__(self, prompt: PromptTokens | None, device: torch.device) -> None:
        none = torch.empty(0, dtype=torch.int64, device=device)
        self._known = prompt.known if prompt is not None else frozenset[int]()
        self._places: dict[int, int] = {}  # in `made`
        self.num_counted = 0
        self.seen = prompt.ids if prompt is not None else none
        self.made = none
        self.made_counts = torch.empty(0, dtype=torch.float32, device=device)

    def add(self, token_ids: Many[int]) -> None:
        """Counts what the answer has more."""
        fresh = [id_ for id_ in dict.fromkeys(token_ids) if id_ not in self._places]
        self._places |= {id_: len(self._places) + i for i, id_ in enumerate(fresh)}
        self.made = self._longer(self.made, fresh)
        self.made_counts = self._longer(self.made_counts, [0] * len(fresh))
        self.seen = self._longer(self.seen, [id_ for id_ in fresh if id_ not in self._known])
        for id_ in token_ids:
            self.made_counts[self._places[id_]] += 1
        self.num_counted += len(token_ids)

    def _longer(self, held: torch.Tensor, more: list[int]) -> torch.Tensor:
        return torch.cat((held, torch.tensor(more, dtype=held.dtype, device=held.device))) if more else held


class Counted:
    """The counts of requests and sequences alive; they go with them."""

    def __init__(self) -> None:
        self._prompts: WeakKeyDictionary[Request, PromptTokens] = WeakKeyDictionary()
        self._answers: WeakKeyDictionary[Sequence, TokenCounts] = WeakKeyDictionary()

    def of(self, sequence: Sequence, device: torch.device, *, with_prompt: bool) -> TokenCounts:
        """A sequence's, up to its last token."""
        request = sequence.request
        counts = self._answers.get(sequence)
        if counts is None:
            if with_prompt and request not in self._prompts:
                self._prompts[request] = PromptTokens(request.prompt_ids, device)
            counts = self._answers[sequence] = TokenCounts(self._prompts.get(request), device)
        counts.add(sequence.token_ids[request.prompt_len + counts.num_counted :])
        return counts
