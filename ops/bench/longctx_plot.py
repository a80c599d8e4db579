"""A run of the long context as a picture. A program of its own, which the bench starts: only it needs matplotlib."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ops.bench.plot import main

COLOURS = {"host": "#1f5fa8", "disk": "#2a9d5c"}


def draw(result: dict[str, Any], picture: Path) -> None:
    """Two panels by resident share: time of a token beside its limit, and prefill."""
    figure: Any
    axes: Any
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    settings, budgets = result["settings"], result["budgets"]
    figure.suptitle(f"{result['model']}, {settings['context_tokens']:,} tokens, {result['machine']}")
    for tier in settings["tiers"]:
        rows = sorted((row for row in budgets if row["tier"] in (tier, "resident")), key=lambda row: -row["share"])
        shares = [100 * row["share"] for row in rows]
        axes[0].plot(shares, [1000 * row["token_s"] for row in rows], "o-", color=COLOURS[tier], label=tier)
        limits = [1000 * (row["limit_token_s"] or row["token_s"]) for row in rows]
        axes[0].plot(shares, limits, "--", color=COLOURS[tier], linewidth=1, label=f"{tier}: limit")
        axes[1].plot(shares, [row["prefill_tokens_per_s"] for row in rows], "o-", color=COLOURS[tier], label=tier)
    axes[0].set(title="Decode", xlabel="% of the context on the device", ylabel="ms a token")
    axes[1].set(title="Prefill", xlabel="% of the context on the device", ylabel="tokens/s")
    shown = sorted({100 * row["share"] for row in budgets})
    for axis in axes:
        axis.set_xscale("log")
        axis.invert_xaxis()
        axis.set_xticks(shown, labels=[f"{share:g}" for share in shown])
        axis.minorticks_off()
        axis.set_ylim(0, 1.08 * axis.dataLim.ymax)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend()
    figure.savefig(picture, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    main(draw)
