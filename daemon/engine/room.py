"""What an admission depends on: while none of it is better, trying again would only hash the prompt again."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """As it is for the head of the queue at one moment."""

    head: tuple[bool, int, int]  # its rank
    num_running: int
    num_gains: int  # of the tree
    num_blocks: int  # available
    num_slots: int  # available

    def may_fit_after(self, refused: "Room | None") -> bool:
        """Whether the head may fit now, if it did not fit into `refused`. Others that grow make it no room."""
        if refused is None or self.head != refused.head:
            return True
        is_more = self.num_blocks > refused.num_blocks or self.num_slots > refused.num_slots
        return is_more or (self.num_running, self.num_gains) != (refused.num_running, refused.num_gains)
