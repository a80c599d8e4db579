"""The bench's figures as a picture. A program of its own, which the bench starts: only it needs matplotlib."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS, THEIRS, HIT = "#1f5fa8", "#b0b0b0", "#2a9d5c"


def main(draw: Callable[[dict[str, Any], Path], None]) -> None:
    """Draws what a command line says: RESULT.json PICTURE.png."""
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    draw(json.loads(arguments.result.read_text(encoding="utf-8")), arguments.picture)


def draw(result: dict[str, Any], picture: Path) -> None:
    """Four panels: rates by context, first token cold and on a hit, streams, beside transformers."""
    figure: Any
    axes: Any
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    figure.suptitle(f"{result['model']}, {result['dtype']} on {result['device']}, {result['threads']} threads")
    _first_token(axes[0, 0], result["contexts"])
    _rates(axes[0, 1], result["contexts"])
    _streams(axes[1, 0], result["streams"])
    _compared(axes[1, 1], result["ours"], result["reference"])
    figure.savefig(picture, dpi=130)
    plt.close(figure)


def _first_token(axis: Any, contexts: list[dict[str, Any]]) -> None:
    places = range(len(contexts))
    cold = [row["cold_first_token_s"] for row in contexts]
    hits = [row["hit_first_token_s"] or 0 for row in contexts]
    _label(axis, axis.bar([x - 0.2 for x in places], cold, 0.4, color=OURS, label="cold"), "{:.2f}")
    _label(axis, axis.bar([x + 0.2 for x in places], hits, 0.4, color=HIT, label="device-cache hit"), "{:.2f}")
    axis.set_xticks(list(places), [f"{row['context_tokens']:,}" for row in contexts])
    axis.set(title="Time to first token", xlabel="prompt (tokens)", ylabel="seconds")
    axis.legend()


def _rates(axis: Any, contexts: list[dict[str, Any]]) -> None:
    places = range(len(contexts))
    bars = axis.bar(places, [row["prefill_tokens_per_s"] for row in contexts], 0.5, color=OURS)
    _label(axis, bars, "{:,.0f}")
    axis.set_xticks(
        list(places),
        [f"{row['context_tokens']:,}\n(decode {row['decode_tokens_per_s']:.0f} tok/s)" for row in contexts],
    )
    axis.set(title="Prefill", xlabel="prompt (tokens)", ylabel="tokens/s")


def _streams(axis: Any, streams: list[dict[str, Any]]) -> None:
    places = range(len(streams))
    _label(axis, axis.bar(places, [row["tokens_per_s"] for row in streams], 0.5, color=OURS), "{:.0f}")
    axis.set_xticks(
        list(places),
        [f"{row['streams']}\n(front {row['front_cpu_us_per_message']:.0f} µs a message)" for row in streams],
    )
    axis.set(title="Decode of concurrent streams", xlabel="streams", ylabel="tokens/s, all together")


def _compared(axis: Any, ours: dict[str, float], theirs: dict[str, float] | None) -> None:
    names = ("prefill_tokens_per_s", "decode_tokens_per_s")
    ratios = [ours[name] / theirs[name] if theirs else 0 for name in names]
    _label(axis, axis.bar(range(2), ratios, 0.5, color=OURS), "{:.2f}x")
    axis.axhline(1.0, color=THEIRS, linewidth=2, label="transformers")
    axis.set_xticks([0, 1], ["prefill", "decode"])
    axis.set(title="Beside transformers, 512 tokens", ylabel="times transformers' tokens/s")
    axis.legend()


def _label(axis: Any, bars: Any, text: str) -> None:
    axis.bar_label(
        bars, labels=[text.format(bar.get_height()) if bar.get_height() else "none" for bar in bars], padding=2
    )
    axis.margins(y=0.15)
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main(draw)
