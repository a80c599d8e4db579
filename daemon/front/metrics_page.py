"""What one scrape says: families of families.py, filled from the front's own counters and one answer of the engine.

What must hold: a page holds each family once, in the catalogue's order, with the catalogue's labels and no other; it is
made while nobody asks for a token in between, so it is made in pieces.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from daemon.front.families import FAMILIES, Family, Type
from daemon.meter_messages import HistogramRow
from tiers.meters import Histogram

END_OF_PAGE = b"# EOF\n"  # of the OpenMetrics format, once


@dataclass(frozen=True, slots=True)
class Rendered:
    """A page as it goes out."""

    content_type: str
    body: bytes


class Page:
    """Samples by family. A family without samples is told by its name and meaning alone."""

    def __init__(self) -> None:
        self._metrics = {name: _metric(family) for name, family in FAMILIES.items()}

    def add(self, name: str, value: float, **labels: str) -> None:
        """One sample of a counter or a gauge."""
        family = FAMILIES[name]
        assert family.type is not Type.HISTOGRAM
        self._labelled(family, labels).add_sample(name, labels, value)

    def add_histogram(self, name: str, histogram: Histogram | HistogramRow, **labels: str) -> None:
        """All samples of one histogram."""
        family = FAMILIES[name]
        assert family.type is Type.HISTOGRAM
        metric = self._labelled(family, labels)
        num_values = 0
        for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            num_values += count
            metric.add_sample(f"{name}_bucket", {**labels, "le": bound}, num_values)
        metric.add_sample(f"{name}_count", labels, num_values)
        metric.add_sample(f"{name}_sum", labels, histogram.total)

    async def render(self, accept: str) -> Rendered:
        """In the text format, or as OpenMetrics where the Accept header asks for it.

        Other tasks go on between two families.
        """
        encode, content_type = choose_encoder(accept)
        pieces: list[bytes] = []
        for metric in self._metrics.values():
            pieces.append(_encoded(encode, metric))
            await asyncio.sleep(0)
        if "openmetrics" in content_type:
            pieces.append(END_OF_PAGE)
        return Rendered(content_type, b"".join(pieces))

    def _labelled(self, family: Family, labels: dict[str, str]) -> Metric:
        assert set(labels) == set(family.labels), f"{family.name} has the labels {family.labels}, not {set(labels)}"
        return self._metrics[family.name]


class _Single(Collector):
    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


def _encoded(encode: Callable[[Collector], bytes], metric: Metric) -> bytes:
    return encode(_Single(metric)).removesuffix(END_OF_PAGE)


def _metric(family: Family) -> Metric:
    return Metric(family.name.removesuffix("_total"), family.meaning, family.type.value)
