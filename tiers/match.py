"""What a look-up found: which blocks a prompt need not compute, where they are, and why there are no more."""

from dataclasses import dataclass
from enum import StrEnum

from tiers.tree import Node


class MatchEnd(StrEnum):
    """Why a look-up did not go further."""

    WHOLE = "every grid position below the prompt's end is cached"
    UNKNOWN = "no further block is known"
    SHORT = "the prompt has no grid position strictly inside"
    NO_CHECKPOINT = "blocks are known further, but no checkpoint of the recurrent state"
    OTHER_PROFILE = "on disk it goes on, but as another numerics profile computed it"
    BELOW = "a lower tier has more"


@dataclass(frozen=True, slots=True)
class Deeper:
    """How much further the lower tiers reach: every block up to `resume_len`, and the state there, is in some tier."""

    nodes: tuple[Node, ...]  # beyond the match's own, in order; some of them may be on the device all the same
    resume_len: int


@dataclass(frozen=True, slots=True)
class Match:
    """What a look-up found. Positions [0, resume_len) need not be computed; `nodes`, all on the device, hold them."""

    nodes: tuple[Node, ...]
    resume_len: int  # a multiple of the grid, strictly below the prompt's length
    known_len: int  # tokens of the known path, floored to the grid: where the prompt leaves it
    end: MatchEnd
    deeper: Deeper | None = None  # None where lower tiers add nothing

    @property
    def last(self) -> Node | None:
        """The deepest node, in whichever tier."""
        nodes = self.nodes if self.deeper is None else self.deeper.nodes
        return nodes[-1] if nodes else None

    @property
    def checkpoint(self) -> int | None:
        """Slot id of the state at resume_len, where the model has slots."""
        return self.nodes[-1].checkpoint if self.nodes else None
