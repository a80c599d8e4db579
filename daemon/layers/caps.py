"""What a layer can do, said once and without defaults; a composite's capabilities are derived from its parts."""

from dataclasses import dataclass, fields
from functools import reduce


@dataclass(frozen=True, slots=True)
class LayerCaps:
    """Capabilities of a mixer, an MLP or a whole model. A False routes to a per-sequence path, it never refuses."""

    batched_decode: bool  # one forward takes decode rows of many sequences
    verify_rows: bool  # one forward takes k consecutive rows of several sequences
    graph_capture: bool  # replays from ids in device tensors alone
    no_host_stage: bool  # needs nothing fetched by the host before the step
    streaming: bool  # can attend to history that is not resident
    reads_history: bool  # prefill reads the paged history, so a reused prefix is never hidden

    def __and__(self, other: "LayerCaps") -> "LayerCaps":
        """What both can do."""
        return LayerCaps(*(getattr(self, f.name) and getattr(other, f.name) for f in fields(self)))


def combine(parts: list[LayerCaps]) -> LayerCaps:
    """The capabilities of something made of all these parts."""
    assert parts
    return reduce(LayerCaps.__and__, parts)
