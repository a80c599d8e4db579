"""Drawing one token from each row of logits, and the penalties before it.

A draw is a pure function of the logits, the parameters and one uniform number that comes from the request's own seed
and the token's position, so that other traffic never shifts it. Filters apply in this order: temperature, top-k, top-p,
min-p, typical-p, each on what the one before left over. Ties go to the lowest token id.
"""

from dataclasses import dataclass

import torch

_MASK64 = (1 << 64) - 1
_HEAD = 1024  # candidates looked at first; top-p seldom keeps more


@dataclass(frozen=True, slots=True)
class Filters:
    """One row's distribution. Neutral values switch a filter off; temperature 0 is greedy."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_plain(self) -> bool:
        """Nothing but temperature."""
        return self.top_k == 0 and self.top_p == 1.0 and self.min_p == 0.0 and self.typical_p == 1.0


@dataclass(frozen=True, slots=True)
class Penalties:
    """What a row's history does to its logits: [vocab] logits in, changed in place."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    @property
    def is_neutral(self) -> bool:
        return self.repetition == 1.0 and self.presence == 0.0 and self.frequency == 0.0


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1) for one position of one seed: two rounds of the SplitMix64 finaliser, 53 bits.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    mixed = _mix64(_mix64((seed + 0x9E3779B97F4A7C15) & _MASK64) ^ ((position * 0xD1342543DE82EF95) & _MASK64))
    return ((mixed >> 11) + 0.5) * 2.0**-53


def apply_penalties(
    logits: torch.Tensor, penalties: Penalties, seen: torch.Tensor, made: torch.Tensor, made_counts: torch.Tensor
) -> None:
    """Changes one row [vocab] in place.

    Args:
        seen: [num_seen] int64, unique ids of prompt and output, for the repetition penalty (Keskar et al., 2019).
        made: [num_made] int64, unique ids of the output alone, for presence and frequency.
        made_counts: [num_made] float32, how often each was made.
    """
    if penalties.repetition != 1.0:
        values = logits[seen]
        changed = torch.where(values > 0, values / penalties.repetition, values * penalties.repetition)
        # The smallest penalties make the largest float of a logit, and no infinity: a softmax of that is no number.
        logits[seen] = changed.clamp(max=torch.finfo(logits.dtype).max)
    if penalties.presence or penalties.frequency:
        logits[made] -= penalties.presence + penalties.frequency * made_counts


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """[rows, vocab] to [rows] int64: the lowest id among the largest logits, which torch's `max` promises."""
    return logits.max(-1).indices


def all_finite(logits: torch.Tensor) -> torch.Tensor:
    """[rows, vocab] to [rows] bool: the row has no infinity and no NaN, which both its ends would show."""
    return logits.amax(-1).isfinite().logical_and_(logits.amin(-1).isfinite())


def draw(logits: torch.Tensor, filters: Filters, number: float) -> int:
    """One row [vocab] and a number in (0, 1) to a token id, by inverting the filtered distribution's sum.

    The plain case walks ids in order, the filtered one by falling probability; both in float64.
    """
    if filters.is_greedy:
        return int(greedy(logits.unsqueeze(0)))
    scaled = logits.double() / filters.temperature
    if filters.is_plain:
        return _invert(torch.softmax(scaled, -1), number)
    probs, ids = filtered(scaled, filters)
    return int(ids[_invert(probs, number)])


def filtered(scaled: torch.Tensor, filters: Filters) -> tuple[torch.Tensor, torch.Tensor]:
    """What the filters leave of one row [vocab] of tempered logits: (probabilities [kept], ids [kept]).

    Probabilities fall, equal ones by rising id, and sum to 1. At least one token is always kept.
    """
    probs, ids = _ordered(scaled - scaled.max(), filters)  # huge ones would swallow the logarithm of a sum
    if filters.top_p < 1.0:
        before = probs.cumsum(-1) - probs
        probs, ids = _keep(probs, ids, before < filters.top_p)
    if filters.min_p > 0.0:
        probs, ids = _keep(probs, ids, probs >= filters.min_p * probs[0])
    if filters.typical_p < 1.0:
        probs, ids = _keep(probs, ids, _typical(probs, filters.typical_p))
    return probs, ids


def _ordered(scaled: torch.Tensor, filters: Filters) -> tuple[torch.Tensor, torch.Tensor]:
    """Falling probabilities after top-k: at least as many as the other filters can keep, seldom all."""
    vocab_size = scaled.numel()
    if 0 < filters.top_k < vocab_size:
        ordered, ids = _head(scaled, filters.top_k)
        return torch.softmax(ordered, -1), ids
    log_total = scaled.logsumexp(-1)
    if filters.top_p < 1.0:
        ordered, ids = _head(scaled, min(_HEAD, vocab_size))
        probs = (ordered - log_total).exp()
        if float(probs.sum()) >= filters.top_p:
            return probs, ids
    ordered, ids = torch.sort(scaled, descending=True, stable=True)
    return (ordered - log_total).exp(), ids


def _head(scaled: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest values in order, ties by lowest id, without sorting the rest."""
    smallest = torch.topk(scaled, count).values[-1]
    ids = (scaled >= smallest).nonzero().squeeze(-1)  # rising ids; more than `count` where the last value ties
    ordered, order = torch.sort(scaled[ids], descending=True, stable=True)
    return ordered[:count], ids[order[:count]]


def _typical(probs: torch.Tensor, mass: float) -> torch.Tensor:
    """Mask of the tokens whose surprise is nearest the entropy, up to `mass` (Meister et al., 2023, section 3)."""
    surprise = -probs.log()
    distance = (surprise - torch.special.entr(probs).sum()).abs()
    order = torch.sort(distance, stable=True).indices
    reached = probs[order].cumsum(-1) - probs[order]
    mask = torch.zeros_like(probs, dtype=torch.bool)
    mask[order] = reached < mass
    return mask


def _keep(probs: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kept = probs[mask]
    return kept / kept.sum(), ids[mask]


def _invert(probs: torch.Tensor, number: float) -> int:
    sums = probs.cumsum(-1)
    index = int(torch.searchsorted(sums, number * float(sums[-1]), right=True))
    if index < probs.numel() and float(probs[index]) > 0.0:
        return index
    return int(probs.nonzero()[-1])  # rounding put the number past the last token that has any probability


def _mix64(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
