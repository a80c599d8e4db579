"""The embedded model: its greedy text is transformers', and its bytes do not tell a resumed prefill from a cold one."""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from daemon.config import EngineConfig
from daemon.models.load import load_model
from tests.parity.driver import Driver

NUM_TOKENS = 64
PROMPTS = (
    "The three primary colours are",
    "Write a short letter to a lighthouse keeper who has not seen anybody for a year.",
    "def fibonacci(n):\n    ",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    """DOWNCORE_SMOLLM2, or where the embedded model is fetched to."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    found = Path(os.environ.get("DOWNCORE_SMOLLM2") or cache / "downcore/models/smollm2-135m-instruct")
    if not (found / "model.safetensors").is_file():
        pytest.skip("SmolLM2 is not there: run downcore model fetch, or set DOWNCORE_SMOLLM2")
    return found


def load(folder: Path, dtype: str):
    config = EngineConfig(model_path=str(folder), device="cpu", dtype=dtype)
    return load_model(config, lambda done_bytes, total_bytes: None).model


def test_greedy_text_is_theirs(folder):
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    driver = Driver(load(folder, "float32"), block_size=64, num_blocks=16)
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        with torch.inference_mode():
            expected = theirs.generate(  # pyright: ignore[reportAttributeAccessIssue]
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(ids) :].tolist()
        sequence = driver.add()
        answer = [int(driver.prefill(sequence, ids, 1024)[-1].argmax())]
        while len(answer) < NUM_TOKENS:
            answer.append(int(driver.step([(sequence, answer[-1:])])[0].argmax()))
        driver.free(sequence)
        assert len(expected) == NUM_TOKENS
        assert tokenizer.decode(answer) == tokenizer.decode(expected)


def test_a_prefill_resumed_on_the_grid_gives_the_bytes_of_a_cold_one_in_bfloat16(folder):
    driver = Driver(load(folder, "bfloat16"), block_size=64, num_blocks=128)
    text = torch.randint(0, 49152, (2049,), generator=torch.Generator().manual_seed(0)).tolist()
    for length in (1025, 2048, 2049):
        cold = driver.add()
        expected = driver.prefill(cold, text[:length], 1024)[-1]
        for position in range(1024, length, 1024):
            child = driver.fork(cold, position)
            assert torch.equal(driver.prefill(child, text[position:length], 1024)[-1], expected)
            for part, held in driver.state(child).items():
                assert torch.equal(held, driver.state(cold)[part]), part
            driver.free(child)
        driver.free(cold)
