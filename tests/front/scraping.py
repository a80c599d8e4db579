"""HTTP as a scraper speaks it, and the checks of a page that promtool makes."""

import http.client
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
RESERVED_ENDS = ("_count", "_sum", "_bucket", "_created")
NOT_BASE_UNITS = re.compile(
    r"_(ms|milliseconds|us|microseconds|ns|minutes|hours|days|kb|mb|gb|kib|mib|gib|kilobytes|megabytes|percent)(_|$)"
)


@dataclass(frozen=True)
class Response:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def get(port: int, path: str, *, accept: str = "", method: str = "GET") -> Response:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers={"Accept": accept} if accept else {})
    response = connection.getresponse()
    found = Response(response.status, dict(response.getheaders()), response.read())
    connection.close()
    return found


def get_over_unix(path: str, target: str) -> bytes:
    """The whole answer of a Unix socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(path)
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return b"".join(iter(lambda: connection.recv(65536), b""))


def metrics_port(log: Iterable[str]) -> int:
    """Where a front says that it serves metrics."""
    (line,) = (line for line in log if "metrics on http" in line)
    found = re.search(r"metrics on http://[^:]+:(\d+)", line)
    assert found is not None, line
    return int(found[1])


def families(body: bytes) -> dict[str, Metric]:
    """A page in the text format, parsed; counters by their whole name."""
    return {
        f"{metric.name}_total" if metric.type == "counter" else metric.name: metric
        for metric in text_families(body.decode())
    }


def values(body: bytes, name: str, **labels: str) -> float:
    """The sum of a family's samples of this name that have these labels."""
    return sum(
        sample.value
        for metric in text_families(body.decode())
        for sample in metric.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def parsed_strictly(body: bytes) -> dict[str, Metric]:
    """A page in the OpenMetrics format, whose parser refuses what is merely sloppy."""
    return {metric.name: metric for metric in openmetrics_families(body.decode())}


def complaints(body: bytes) -> list[str]:
    """What `promtool check metrics` would say of a page in the text format, and that no sample comes twice."""
    found: list[str] = []
    seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    for name, metric in families(body).items():
        if not metric.documentation:
            found.append(f"{name}: no help text")
        if metric.type == "unknown":
            found.append(f"{name}: no type")
        if metric.type != "histogram" and name.endswith(RESERVED_ENDS):
            found.append(f"{name}: the end of its name belongs to histograms")
        if metric.type == "gauge" and name.endswith("_total"):
            found.append(f"{name}: a gauge that is named as a counter")
        if metric.type in name.split("_"):
            found.append(f"{name}: its type is in its name")
        if name != name.lower() or NOT_BASE_UNITS.search(name):
            found.append(f"{name}: not in snake case or not in base units")
        if metric.type == "histogram":
            found += _complaints_of_histogram(metric)
        for sample in metric.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            if key in seen:
                found.append(f"{key}: comes twice")
            seen.add(key)
            if metric.type == "counter" and not (sample.name.endswith("_total") and sample.value >= 0):
                found.append(f"{sample.name}: a counter whose name does not end in _total, or below zero")
    return found


def _complaints_of_histogram(metric: Metric) -> list[str]:
    series: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for sample in metric.samples:
        rest = tuple(sorted((key, value) for key, value in sample.labels.items() if key != "le"))
        end = sample.name.removeprefix(metric.name)
        series.setdefault(rest, {})[sample.labels.get("le", end)] = sample.value
    found: list[str] = []
    for labels, samples in series.items():
        bounds = [value for key, value in samples.items() if not key.startswith("_")]
        if bounds != sorted(bounds) or samples.get("+Inf") != samples.get("_count") or "_sum" not in samples:
            found.append(f"{metric.name}{dict(labels)}: not a whole histogram")
    return found
