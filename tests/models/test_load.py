"""Loading a folder: every byte in its place, once; and every way a folder can be wrong, told clearly."""

import json
import os
import resource
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from daemon.config import EngineConfig, LoadFormat
from daemon.models.base import BuildOptions
from daemon.models.load import build_dummy, choose_tile, known_families, load_model
from daemon.weights import reader
from daemon.weights.errors import CheckpointError, ConfigError, LoadError
from tests.parity.checkpoints import make_pair, tokens
from tests.parity.driver import Driver

CPU = BuildOptions(torch.float32, torch.device("cpu"), 16)


@pytest.fixture
def folder(tmp_path):
    make_pair("qwen3_moe", tmp_path)
    return tmp_path


def settings(folder, **changes):
    return EngineConfig(model_path=str(folder), device="cpu", block_size=4, grid=16, **changes)


def quiet(done_bytes, total_bytes):
    pass


def logits(model, count=20):
    driver = Driver(model, block_size=4)
    return driver.prefill(driver.add(), tokens(count), 16)


def change_config(folder, **changes):
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v != "absent"}))


def change_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_shards_give_the_same_model_and_the_same_digest(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    make_pair("qwen3_moe", tmp_path / "one")
    make_pair("qwen3_moe", tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one = load_model(settings(tmp_path / "one"), quiet)
    many = load_model(settings(tmp_path / "many"), quiet)
    assert torch.equal(logits(one.model), logits(many.model))
    assert one.weights_digest == many.weights_digest
    assert one.architecture_digest == many.architecture_digest


def test_one_changed_byte_changes_the_digest(folder):
    before = load_model(settings(folder), quiet).weights_digest
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    assert load_model(settings(folder), quiet).weights_digest != before


def test_tensors_larger_than_the_buffer_arrive_whole(folder, monkeypatch):
    expected = logits(load_model(settings(folder), quiet).model)
    monkeypatch.setattr(reader, "BUFFER_BYTES", 1000)
    assert torch.equal(logits(load_model(settings(folder), quiet).model), expected)


def test_progress_counts_every_byte_and_ends_at_the_total(folder):
    calls = []
    load_model(settings(folder), lambda done_bytes, total_bytes: calls.append((done_bytes, total_bytes)))
    total = sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_a_file_truncated_by_one_byte_is_refused(folder):
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="truncated"):
        load_model(settings(folder), quiet)


DAMAGES = {
    "a missing tensor": (lambda t: t.pop("model.norm.weight"), "lacks model.norm.weight"),
    "an expert missing": (lambda t: t.pop("model.layers.0.mlp.experts.3.up_proj.weight"), "lacks .*experts.3"),
    "a tensor too many": (lambda t: t.update(other=torch.ones(3)), "'other' does not belong"),
    "a wrong shape": (lambda t: t.update({"model.norm.weight": torch.ones(63)}), r"shape \[63\].*\[64\]"),
    "whole numbers": (lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}), "int32"),
    "quantised numbers": (
        lambda t: t.update({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}),
        "float8",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_checkpoint_unlike_its_configuration_is_refused(folder, name):
    change, what = DAMAGES[name]
    change_weights(folder, change)
    with pytest.raises(CheckpointError, match=what) as caught:
        load_model(settings(folder), quiet)
    assert str(folder) not in str(caught.value)


CONFIGS = {
    "an unknown family": ({"model_type": "gpt9"}, r"'gpt9' is not supported, only .*llama.*qwen3_moe"),
    "a family that is a module of ours": ({"model_type": "base"}, "not supported"),
    "a family that is the loader": ({"model_type": "load"}, "not supported"),
    "a family that is a path": ({"model_type": "../llama"}, "not supported"),
    "a family that is a number": ({"model_type": 7}, "must be a string"),
    "no family": ({"model_type": "absent"}, "model_type is missing"),
    "no size": ({"hidden_size": "absent"}, "hidden_size is missing"),
    "a size of zero": ({"hidden_size": 0}, "hidden_size must be"),
    "a size that is a string": ({"num_hidden_layers": "4"}, "num_hidden_layers must be"),
    "a size that is true": ({"num_hidden_layers": True}, "num_hidden_layers must be"),
    "very many layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers must be"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
    "more choices than experts": ({"num_experts_per_tok": 9}, "exceeds the number of experts"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    "sliding windows": ({"use_sliding_window": True}, "use_sliding_window"),
    "quantised weights": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "an unknown rotation": ({"rope_parameters": {"rope_type": "spiral"}}, "'spiral' is not supported"),
    "a rotation without its factor": ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
    "an infinite theta": ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta must be"),
    "an eps that is not a number": ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be"),
    "a model that no memory holds": ({"hidden_size": 2**30, "head_dim": 2**30}, "cannot be allocated"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_out_of_bounds_is_refused(folder, name):
    changes, what = CONFIGS[name]
    change_config(folder, **changes)
    with pytest.raises(ConfigError, match=what):
        load_model(settings(folder), quiet)


def test_a_configuration_that_is_not_one_is_refused(folder):
    for content in (b"", b"[]", b"{", b"[" * 100_000, b"\xff"):
        (folder / "config.json").write_bytes(content)
        with pytest.raises(ConfigError, match=r"not (a )?JSON"):
            load_model(settings(folder), quiet)
    (folder / "config.json").write_bytes(b" " * (5 << 20))
    with pytest.raises(ConfigError, match="larger than"):
        load_model(settings(folder), quiet)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_model(settings(folder), quiet)
    with pytest.raises(LoadError, match="not a folder"):
        load_model(settings(folder / "nowhere"), quiet)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "weights.bin", "..", "x\0.safetensors", 7]
)
def test_an_index_cannot_name_a_file_elsewhere(folder, name):
    (folder.parent / "outside.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / reader.INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a safetensors file of this folder"):
        load_model(settings(folder), quiet)


def test_pickled_weights_are_never_opened(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match="neither"):
        load_model(settings(folder), quiet)


def test_end_tokens_come_from_both_files(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert load_model(settings(folder), quiet).model.facts.eos_token_ids == (2, 7)


def test_dummy_weights_need_no_files_and_follow_the_seed(folder):
    (folder / "model.safetensors").unlink()
    first = load_model(settings(folder, load_format=LoadFormat.DUMMY, seed=1), quiet)
    again = load_model(settings(folder, load_format=LoadFormat.DUMMY, seed=1), quiet)
    other = load_model(settings(folder, load_format=LoadFormat.DUMMY, seed=2), quiet)
    expected = logits(first.model)
    assert torch.isfinite(expected).all()
    assert torch.equal(logits(again.model), expected)
    assert first.weights_digest == again.weights_digest != other.weights_digest
    assert not torch.equal(logits(other.model), expected)


def test_a_model_says_what_it_is():
    values = {
        "model_type": "llama", "vocab_size": 50, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 99, "eos_token_id": [1, 3],
    }  # fmt: skip
    tied = build_dummy(values | {"tie_word_embeddings": True}, CPU)
    layer = 8 * (8 + 4 + 4) + 8 * 8 + 3 * 8 * 12
    assert tied.facts.num_parameters == 50 * 8 + 2 * (layer + 16) + 8
    assert build_dummy(values, CPU).facts.num_parameters == tied.facts.num_parameters + 50 * 8
    assert tied.facts.weight_bytes == 4 * tied.facts.num_parameters
    assert tied.facts.max_context_tokens == 99
    assert tied.facts.eos_token_ids == (1, 3)
    assert tied.compute.matmul_params == 2 * layer + 50 * 8
    assert tied.compute.pair_flops == 2 * 4 * 8
    assert tied.layout(4).bytes_per_token == 2 * 2 * 2 * 2 * 4
    assert {"llama", "qwen3", "qwen3_moe"} <= set(known_families())


def test_a_tile_is_whole_blocks_and_a_divisor_of_the_grid():
    for block_size in (1, 4, 16, 48, 64, 100, 1024):
        for blocks in (1, 2, 3, 16, 17, 64):
            grid = block_size * blocks
            tile = choose_tile(grid, block_size)
            assert tile % block_size == 0
            assert grid % tile == 0
            assert tile <= max(1024, block_size)
    assert choose_tile(None, 64) == choose_tile(4096, 64) == 1024


MEASURE = """
import resource, sys, torch
from daemon.config import EngineConfig
from daemon.models.load import load_model
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
loaded = load_model(EngineConfig(model_path=sys.argv[1], device="cpu"), lambda done, total: None)
print(peak() - before, loaded.model.facts.weight_bytes)
"""


def test_host_memory_never_holds_the_model_twice(tmp_path):
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0
    config = {
        "model_type": "llama", "vocab_size": 1000, "hidden_size": 1024, "intermediate_size": 4096,
        "num_hidden_layers": 5, "num_attention_heads": 16, "num_key_value_heads": 16, "dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = {"q_proj": (1024, 1024), "k_proj": (1024, 1024), "v_proj": (1024, 1024), "o_proj": (1024, 1024)}
    mlp = {"gate_proj": (4096, 1024), "up_proj": (4096, 1024), "down_proj": (1024, 4096)}
    tensors = {"model.embed_tokens.weight": (1000, 1024), "lm_head.weight": (1000, 1024), "model.norm.weight": (1024,)}
    for i in range(5):
        layer = f"model.layers.{i}."
        tensors |= {f"{layer}self_attn.{name}.weight": shape for name, shape in sizes.items()}
        tensors |= {f"{layer}mlp.{name}.weight": shape for name, shape in mlp.items()}
        tensors |= {f"{layer}{name}.weight": (1024,) for name in ("input_layernorm", "post_attention_layernorm")}
    save_file({name: torch.full(shape, 0.01) for name, shape in tensors.items()}, tmp_path / "model.safetensors")
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    grown, weight_bytes = map(int, run.stdout.split())
    assert weight_bytes > 300 << 20
    assert grown < weight_bytes + (64 << 20)
