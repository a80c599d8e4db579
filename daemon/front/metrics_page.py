"""One page of /metrics: samples of the families of families.py, written as Prometheus or OpenMetrics readers want them.

What must hold: a page has each family once, in the catalogue's order, with the catalogue's labels and no other. It is
written here and not by prometheus_client, which in OpenMetrics turns the colon of a sample's name into an underscore,
but not that of its family (client_python#1177): no reader would find vLLM's names.
"""

import asyncio
from dataclasses import dataclass

from daemon.front.families import FAMILIES, Family, Type
from daemon.meter_messages import HistogramRow
from tiers.meters import Histogram

OPENMETRICS = "application/openmetrics-text"


@dataclass(frozen=True, slots=True)
class Format:
    """How a page is written."""

    content_type: str
    is_openmetrics: bool


TEXT_FORMAT = Format("text/plain; version=0.0.4; charset=utf-8", is_openmetrics=False)
OPENMETRICS_FORMAT = Format(f"{OPENMETRICS}; version=1.0.0; charset=utf-8", is_openmetrics=True)


def format_for(accept: str) -> Format:
    """What a reader with this Accept header gets: OpenMetrics where it names that, else the text format."""
    named = {kind.partition(";")[0].strip() for kind in accept.split(",")}
    return OPENMETRICS_FORMAT if OPENMETRICS in named else TEXT_FORMAT


class Page:
    """Samples by family. A family without samples is told by its name and meaning alone."""

    def __init__(self) -> None:
        self._samples: dict[str, list[str]] = {name: [] for name in FAMILIES}

    def add(self, name: str, value: float, **labels: str) -> None:
        """One sample of a counter or a gauge."""
        family = FAMILIES[name]
        assert family.type is not Type.HISTOGRAM
        self._samples_of(family, labels).append(_sample(name, _pairs(labels), value))

    def add_histogram(self, name: str, histogram: Histogram | HistogramRow, **labels: str) -> None:
        """All samples of one histogram."""
        family = FAMILIES[name]
        assert family.type is Type.HISTOGRAM
        samples, pairs = self._samples_of(family, labels), _pairs(labels)
        num_values = 0
        for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
            num_values += count
            samples.append(_sample(f"{name}_bucket", [*pairs, f'le="{bound}"'], num_values))
        samples.append(_sample(f"{name}_count", pairs, num_values))
        samples.append(_sample(f"{name}_sum", pairs, histogram.total))

    async def write(self, format_: Format) -> bytes:
        """The page. Other tasks go on between two families."""
        pieces: list[str] = []
        for name, samples in self._samples.items():
            pieces += _heading(FAMILIES[name], format_)
            pieces += samples
            await asyncio.sleep(0)
        if format_.is_openmetrics:
            pieces.append("# EOF\n")
        return "".join(pieces).encode()

    def _samples_of(self, family: Family, labels: dict[str, str]) -> list[str]:
        assert set(labels) == set(family.labels), f"{family.name} has the labels {family.labels}, not {set(labels)}"
        return self._samples[family.name]


def _heading(family: Family, format_: Format) -> tuple[str, str]:
    name = family.name.removesuffix("_total") if format_.is_openmetrics else family.name
    return f"# HELP {name} {_escaped(family.meaning)}\n", f"# TYPE {name} {family.type}\n"


def _sample(name: str, pairs: list[str], value: float) -> str:
    number = int(value) if isinstance(value, bool) else value
    return f"{name}{{{','.join(pairs)}}} {number}\n" if pairs else f"{name} {number}\n"


def _pairs(labels: dict[str, str]) -> list[str]:
    return [f'{key}="{_escaped(value)}"' for key, value in labels.items()]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
