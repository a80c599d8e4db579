"""transformers on the same weights, as a program of its own: commands as JSON lines on stdin, answers on stdout.

The bench starts it, since nothing else under ops imports torch. It computes only between a command and its answer, so
the two sides take turns on the machine.
"""

import argparse
import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

FIRST_ID = 1000  # clear of special tokens
DECODED_ID = 2000


def main() -> None:
    """Loads the model, says so, and answers until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    loader: Any = AutoModelForCausalLM
    model = loader.from_pretrained(arguments.model, dtype=torch.bfloat16)
    model.eval()
    _measure(model, 64, 4)  # first calls allocate and pick kernels
    _say({"ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        _say(_measure(model, command["context_tokens"], command["decode_tokens"]))


def _measure(model: Any, context_tokens: int, decode_tokens: int) -> dict[str, float]:
    """Seconds for a prompt from nothing, and for `decode_tokens` steps of one token after it."""
    ids = torch.arange(FIRST_ID, FIRST_ID + context_tokens).unsqueeze(0)  # [1, context_tokens]
    token = torch.tensor([[DECODED_ID]])
    with torch.inference_mode():
        started = time.perf_counter()
        output = model(ids, use_cache=True, logits_to_keep=1)
        prefilled = time.perf_counter()
        state = output.cache
        for _ in range(decode_tokens):
            state = model(token, cache=state, use_cache=True).cache
        finished = time.perf_counter()
    return {"prefill_s": prefilled - started, "decode_s": finished - prefilled}


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
