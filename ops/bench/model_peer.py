"""Times transformers on a configuration, weights made up: `python -m ops.bench.model_peer CONFIG PART...`

The peer of daemon/engine/model_bench.py, whose parts it takes and whose keys it prints. It uses fla's kernels where
they are installed. A history is computed, as transformers has no other way to one; that is not timed.
"""

# transformers and the models that it makes have no types that a checker could follow.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

NUM_STEPS = 10
PIECE = 8192  # tokens of a prompt at a time


def main() -> int:
    """Exit status 2 where there is no device to time."""
    parser = argparse.ArgumentParser(prog="ops.bench.model_peer", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("parts", nargs="+")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no device to time", file=sys.stderr)
        return 2
    with torch.inference_mode():
        model = build(arguments.config)
        for part in arguments.parts:
            record: dict[str, Any] = {"part": part}
            try:
                record |= run_part(model, part)
            except Exception as failure:  # one part's failure is that part's line
                record["failure"] = f"{type(failure).__name__}: {failure}".splitlines()[0][:300]
            print(json.dumps(record), flush=True)
            torch.cuda.empty_cache()
    return 0


def build(path: Path) -> Any:
    """The text model, in bfloat16 on the first CUDA device, every weight a small random number."""
    config = AutoConfig.from_pretrained(path).get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cuda").eval()
    for parameter in model.parameters():
        parameter.normal_(std=0.02)
    for module in model.modules():
        if "RotaryEmbedding" in type(module).__name__ and hasattr(module, "original_inv_freq"):
            module.__init__(config, device="cuda")  # its frequencies are no parameters
    return model


def run_part(model: Any, part: str) -> dict[str, Any]:
    """Times one part."""
    kind, *numbers = part.split(":")
    context_len = int(numbers[-1])
    num_rows = int(numbers[0]) if kind == "decode" else 1
    ids = torch.randint(0, model.config.vocab_size, (num_rows, context_len), device="cuda")
    if kind == "prefill":
        prompt(model, ids[:, : 2 * PIECE])
        seconds = min(_seconds(lambda: prompt(model, ids), 2))
        return {"context_tokens": context_len, "prefill_s": seconds, "tokens_per_s": context_len / seconds}
    assert kind == "decode", f"unknown part {part!r}"
    cache = prompt(model, ids)
    token = ids[:, :1]

    def turn() -> None:
        nonlocal token
        token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)

    _seconds(turn, 3)
    step_s = median(_seconds(turn, NUM_STEPS))
    return {
        "num_rows": num_rows,
        "context_tokens": context_len,
        "step_ms": 1e3 * step_s,
        "tokens_per_s": num_rows / step_s,
    }


def prompt(model: Any, ids: torch.Tensor) -> Any:
    """Computes a prompt piece by piece; returns its cache."""
    cache = None
    for first in range(0, ids.shape[1], PIECE):
        piece = ids[:, first : first + PIECE]
        cache = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
    return cache


def _seconds(run: Callable[[], object], repeats: int) -> list[float]:
    found: list[float] = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return found


if __name__ == "__main__":
    sys.exit(main())
