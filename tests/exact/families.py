"""A tiny model of every family: configs/NAME.json, weights from a seed, blocks of 4 tokens and a grid of 16.

Each has all kinds of layers of its family, and selects fewer tokens than the longest prompt has where it selects.
"""

import json
import random
from pathlib import Path

from daemon.config import EngineConfig, LoadFormat

FOLDER = Path(__file__).parent / "configs"
FAMILIES = (
    "llama",
    "qwen3",
    "qwen3_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "nemotron_h",
    "kimi_linear",
    "deepseek_v32",
    "glm_moe_dsa",
    "glm5_next",
    "qwen4_exp",
)
DTYPES = ("float32", "bfloat16")
VOCAB_SIZE = 131
BLOCK, GRID = 4, 16
POOL_BYTES = 2 << 20  # hundreds of blocks and some twenty checkpoints of any family


def config_of(family: str, folder: Path, dtype: str, **more: object) -> EngineConfig:
    """Settings of a tiny engine with the family's model; loads are never weighed against computing.

    Args:
        folder: gets the model folder on first use.
        more: further settings, such as host_bytes or disk_path.
    """
    model = folder / family
    if not model.exists():
        model.mkdir(parents=True)
        text = (FOLDER / f"{family}.json").read_text(encoding="utf-8")
        (model / "config.json").write_text(json.dumps({**json.loads(text), "dtype": dtype}))
    settings: dict[str, object] = {
        "load_format": LoadFormat.DUMMY,
        "dtype": dtype,
        "threads": 1,
        "block_size": BLOCK,
        "grid": GRID,
        "pool_bytes": POOL_BYTES,
        "max_sequences": 4,
        "break_even": False,
        "restore_timeout_s": 60.0,
        **more,
    }
    return EngineConfig(str(model), **settings)  # type: ignore[arg-type]


def lengths(num_chunks: int) -> list[int]:
    """Prompt lengths around every block and every grid position, one less and one more, up to so many chunks."""
    around = {position + step for position in range(BLOCK, num_chunks * GRID + BLOCK, BLOCK) for step in (-1, 0, 1)}
    return sorted(around)


def prompt_of(length: int, seed: int) -> list[int]:
    """Token ids that no other seed's prompt begins with."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
