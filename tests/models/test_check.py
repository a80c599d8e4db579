"""What a model needs, from its configuration alone: real configurations against the table of known sizes."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from daemon.models.check import Report, check_model
from daemon.models.fields import Fields
from daemon.models.load import checkpoint_dtype, known_families
from daemon.weights.errors import LoadError
from ops.models.shipped import TINY_HYBRID

CONFIGS = Path(__file__).parent / "configs"
BF16 = 2  # bytes


@dataclass(frozen=True, slots=True)
class Known:
    """A row of the table. The table counts a convolution's state as K columns, as transformers keeps it; a slot here
    has the K - 1 that the next token needs, so `conv_channels` (all layers together) x 2 bytes come on top. It leaves
    out the open pools of indexers and the last token ids of n-grams, `small_bytes` of a slot.
    """

    config: str
    family: str
    billions: float  # of parameters, as the name says
    bytes_per_token: int
    fixed_bytes: float  # of a sequence, as the table rounds it
    digit: float  # the table's last digit
    conv_channels: int
    small_bytes: int = 0


GDN = 2 * 16 * 128 + 32 * 128  # channels of q, k and v
KNOWN = (
    Known("glm5_next_kpool16", "glm5_next", 314, 11_440, 149e6, 1e6, 34 * 3 * 8192, 11 * 15 * 2 * 128 * BF16),
    Known("glm5_next_kpool4", "glm5_next", 314, 11_968, 149e6, 1e6, 34 * 3 * 8192, 11 * 3 * 2 * 128 * BF16),
    Known("qwen3_next_80b_a3b", "qwen3_next", 80, 24_576, 77.9e6, 1e5, 36 * GDN),
    Known("qwen3_5_9b", "qwen3_5", 9, 32_768, 51.9e6, 1e5, 24 * GDN),
    Known("qwen3_5_moe_35b_a3b", "qwen3_5_moe", 35, 20_480, 64.9e6, 1e5, 30 * GDN),
    # The table has 116 MB for the mixers and 184 KB for the n-gram layer's convolution, of which all 9 columns are
    # kept. A pooled key is 256 bytes for every 4 tokens in this configuration.
    Known(
        "qwen4_exp",
        "qwen4_exp",
        101,
        12 * (2048 + 64),
        116e6 + 184_320,
        1e6,
        36 * (2 * 16 + 48) * 128,
        12 * 3 * 128 * BF16 + 2 * 8,
    ),
    Known("nemotron_h_30b", "nemotron_h", 31.6, 6_144, 49.4e6, 1e5, 23 * (64 * 64 + 2 * 8 * 128)),
    Known("kimi_linear_48b", "kimi_linear", 49, 8_064, 43.9e6, 1e5, 20 * 3 * 32 * 128),
    # The table counts an index key in every layer; where layers share a selection, those have none.
    Known("glm_moe_dsa", "glm_moe_dsa", 744, 109_824, 0, 1, 0),
    Known("deepseek_v32", "deepseek_v32", 671, 85_888, 0, 1, 0),
)


def check_config(name: str, tmp_path: Path, pool_bytes: int = 64 << 30) -> Report:
    shutil.copy(CONFIGS / f"{name}.json", tmp_path / "config.json")
    return check_model(tmp_path, pool_bytes=pool_bytes, max_sequences=16)


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.config)
def test_the_state_of_a_real_configuration_has_the_size_that_the_table_says(known: Known, tmp_path: Path) -> None:
    report = check_config(known.config, tmp_path)
    assert report.family == known.family
    assert report.dtype == "bfloat16"
    assert report.num_parameters / 1e9 == pytest.approx(known.billions, rel=0.01)
    assert report.weight_bytes == pytest.approx(BF16 * report.num_parameters, rel=0.01)
    assert report.bytes_per_token == known.bytes_per_token
    assert report.block_bytes == 64 * known.bytes_per_token
    counted_by_the_table = report.slot_payload_bytes - known.small_bytes + known.conv_channels * BF16
    assert abs(counted_by_the_table - known.fixed_bytes) <= known.digit / 2
    assert (
        report.slot_payload_bytes <= report.slot_bytes < report.slot_payload_bytes + 256 * report.num_slot_tensors + 1
    )
    assert report.weights is None


def test_every_family_with_state_is_in_the_table() -> None:
    same = {"qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"}  # other names of what is there
    plain = {"llama", "qwen3", "qwen3_moe"}
    assert {known.family for known in KNOWN} == set(known_families()) - same - plain


def test_layers_that_share_a_selection_keep_no_index_keys(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "glm_moe_dsa.json").read_text())
    config["indexer_types"] = ["full", "full", *["shared", "shared", "shared", "full"] * 19]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert check_model(tmp_path, pool_bytes=1 << 30).bytes_per_token == 78 * 1152 + 21 * 256


def test_the_shipped_model_is_measured_with_its_weights() -> None:
    report = check_model(TINY_HYBRID, pool_bytes=64 << 20, max_sequences=4)
    assert (report.num_parameters, report.bytes_per_token) == (17_676_204, 1_536)
    assert report.slot_payload_bytes == 9 * (6 * 64 * 64 * 4 + 768 * 3 * BF16)
    assert report.weights is not None
    assert report.weights.num_files == 1
    # Norms and decays are fp32 in memory and bf16 in the file.
    assert BF16 * report.num_parameters == report.weights.file_bytes < report.weight_bytes
    assert report.budget.problem is None
    slots = 4 + 2 + (16 << 20) // report.slot_bytes
    blocks = ((64 << 20) - slots * report.slot_bytes) // (64 * 1_536)
    assert (report.budget.num_slots, report.budget.num_blocks) == (slots, blocks)
    assert report.budget.num_tokens == (blocks - 1) * 64
    fits = {fit.context_tokens: fit.num_sequences for fit in report.budget.fits}
    assert fits == {4096: 4, 32768: (blocks - 1) // 512, 131072: (blocks - 1) // 2048}


def test_a_budget_that_holds_nothing_is_told_with_its_reason(tmp_path: Path) -> None:
    report = check_config("glm5_next_kpool4", tmp_path, pool_bytes=1 << 30)
    assert report.budget.problem is not None
    assert "16 sequences need" in report.budget.problem
    assert (report.budget.num_blocks, report.budget.num_tokens, report.budget.fits) == (0, 0, ())


def test_weights_that_exceed_the_machine_are_told_where_no_budget_is_given(tmp_path: Path) -> None:
    shutil.copy(CONFIGS / "glm_moe_dsa.json", tmp_path / "config.json")  # 1.5 TB
    report = check_model(tmp_path)
    assert report.budget.pool_bytes == 0
    assert report.budget.problem is not None
    assert f"weights alone need {report.weight_bytes} bytes" in report.budget.problem


def test_headers_that_do_not_fit_the_configuration_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(TINY_HYBRID / "model.safetensors")
    config = json.loads((TINY_HYBRID / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 1024}))
    with pytest.raises(LoadError, match="the configuration says"):
        check_model(tmp_path)


def test_no_byte_of_a_weight_is_read(tmp_path: Path) -> None:
    header_bytes = 8 + int.from_bytes((TINY_HYBRID / "model.safetensors").read_bytes()[:8], "little")
    num_bytes = (TINY_HYBRID / "model.safetensors").stat().st_size
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((TINY_HYBRID / "model.safetensors").read_bytes()[:header_bytes])
        file.truncate(num_bytes)  # a hole where the weights were
    shutil.copy(TINY_HYBRID / "config.json", tmp_path)
    assert check_model(tmp_path, pool_bytes=1 << 28) == check_model(TINY_HYBRID, pool_bytes=1 << 28)


def test_a_text_part_says_what_a_model_computes_in() -> None:
    assert checkpoint_dtype(Fields({"text_config": {"dtype": "bfloat16"}})) is torch.bfloat16
    assert checkpoint_dtype(Fields({"dtype": "float32", "text_config": {"dtype": "bfloat16"}})) is torch.float32
    assert checkpoint_dtype(Fields({"torch_dtype": "bfloat16"})) is torch.bfloat16
    assert checkpoint_dtype(Fields({})) is torch.float32


def test_the_check_is_no_family(tmp_path: Path) -> None:
    assert "check" not in known_families()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "check"}))
    with pytest.raises(LoadError, match="'check' is not supported, only deepseek_v32"):
        check_model(tmp_path)
