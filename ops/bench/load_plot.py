"""A run of load as a picture. A program of its own, which the bench starts: only it needs matplotlib."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ops.bench.plot import main

PANELS = (
    ("first_token_s", "first_token", "Time to first token"),
    ("between_tokens_s", "between_tokens", "Between tokens"),
    ("total_s", "total", "End to end"),
)


def draw(result: dict[str, Any], picture: Path) -> None:
    """Three distributions as shares of requests below a time, and completed requests over time."""
    figure: Any
    axes: Any
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    settings = result["settings"]
    shape = (
        f"{settings['concurrency']} at a time" if settings["concurrency"] else f"{settings['rate_per_s']:g} a second"
    )
    figure.suptitle(f"{result['model']}: {result['completed']:,} requests, {shape}")
    for axis, (points, name, title) in zip(axes.flat, PANELS, strict=False):
        _shares(axis, result["points"][points], result[name], title)
    _over_time(axes[1, 1], result["points"]["ended_at_s"])
    figure.savefig(picture, dpi=130)
    plt.close(figure)


def _shares(axis: Any, values_s: list[float], found: dict[str, float] | None, title: str) -> None:
    ordered = sorted(value * 1000 for value in values_s)
    axis.plot(ordered, [(number + 1) / len(ordered) for number in range(len(ordered))], color="#1f5fa8")
    for name in ("p50_s", "p99_s"):
        if found is not None:
            at = found[name] * 1000
            axis.axvline(at, color="#b0b0b0", linewidth=1)
            axis.annotate(f"{name[:3]} {at:,.1f}", (at, 0.02), rotation=90, fontsize=8, color="#606060")
    if ordered and ordered[0] > 0:
        axis.set_xscale("log")
    axis.set(title=title, xlabel="milliseconds", ylabel="share below")
    axis.spines[["top", "right"]].set_visible(False)


def _over_time(axis: Any, ended_s: list[float]) -> None:
    axis.hist(ended_s, bins=min(60, max(10, int(max(ended_s, default=1)))), color="#2a9d5c")
    axis.set(title="Completed over time", xlabel="seconds", ylabel="requests")
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main(draw)
