"""GLM-5.3: its state, its pools, and what it is asked to ignore."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from daemon.layers.parameters import Parameters
from daemon.models.base import BuildOptions
from daemon.models.fields import Fields
from daemon.models.load import build_dummy, build_model
from daemon.weights.errors import ConfigError
from kernels.indexer import gated_pool_keys
from tests.parity.checkpoints import BLOCK_SIZE, load, tokens
from tests.parity.driver import Driver
from tests.parity.matrix import SelectionGaps, assert_same_state, check_chunks, our_state, their_cache

REAL = {
    "vocab_size": 154880,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 0,
    "qk_nope_head_dim": 256,
    "v_head_dim": 256,
}
TINY = REAL | {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "num_attention_heads": 2,
    "q_lora_rank": 32,
    "num_hidden_layers": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 2,
}


def equal_scores(model) -> None:
    """Every pool of every indexer scores 0."""
    for layer in model.model.language_model.layers:
        if hasattr(layer.self_attn, "indexer"):
            layer.self_attn.indexer.weights_proj.weight.zero_()


@pytest.mark.parametrize("sizes", [[38], [20, 18], [1, 1, 2, 34]], ids=str)
def test_latents_pooled_keys_open_pools_and_recurrences_are_theirs(sparse_pairs, sizes):
    pair, text = sparse_pairs("glm5_next"), tokens(38)
    expected = {}
    for i, layer in enumerate(their_cache(pair, text).layers):
        if hasattr(layer, "recurrent_states"):
            expected[f"layers.{i}.conv"] = layer.conv_states[0][0, :, -3:].T
            expected[f"layers.{i}.recurrent"] = layer.recurrent_states[0][0]
            continue
        keys, gates = layer.indexer_keys[0, :, :16], layer.indexer_keys[0, :, 16:32]
        ape = pair.theirs.model.language_model.layers[i].self_attn.indexer.index_kpool_compress_ape.detach()
        expected[f"layers.{i}.latent"] = layer.keys[0, 0]
        expected[f"layers.{i}.index_k"] = gated_pool_keys(keys[:36].view(9, 4, 16), gates[:36].view(9, 4, 16), ape)
        tail = torch.cat((keys, gates), dim=-1)[36:]
        expected[f"layers.{i}.index_tail"] = torch.cat((tail, torch.zeros(1, 32)))
    assert_same_state(our_state(pair, text, sizes), expected)


@pytest.mark.parametrize("sizes", [[40], [20, 20], [16, 16, 1, 1, 6]], ids=str)
def test_where_all_scores_tie_both_keep_the_first_pools(sparse_pairs, sizes):
    gaps = SelectionGaps()
    with gaps.watch():
        check_chunks(sparse_pairs("glm5_next", equal_scores), sizes)
    assert gaps.num_ties > 20
    assert not gaps.gaps


def test_vision_and_the_layer_past_the_last_are_passed_over(sparse_pairs, tmp_path):
    pair = sparse_pairs("glm5_next")
    tensors = load_file(pair.folder / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in tensors)
    tensors["model.language_model.layers.4.self_attn.q_proj.weight"] = torch.zeros(2, 2)
    tensors["model.language_model.layers.4.shared_head.norm.weight"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((pair.folder / "config.json").read_bytes())
    text = tokens(20)
    drivers = [Driver(model, block_size=BLOCK_SIZE) for model in (pair.ours, load(tmp_path))]
    first, second = (driver.chunk(driver.add(), text) for driver in drivers)
    assert torch.equal(first, second)


@pytest.mark.parametrize(("pool", "bytes_per_token"), [(16, 11_440), (4, 11_968)])
def test_the_real_model_keeps_the_bytes_that_it_should(pool, bytes_per_token):
    fields = Fields({"model_type": "glm5_next", "text_config": REAL | {"index_kpool": pool}})
    model = build_model(
        fields, BuildOptions(torch.bfloat16, torch.device("meta"), 64), Parameters(torch.device("meta"), torch.bfloat16)
    )
    layout = model.layout(64)
    assert layout.bytes_per_token == bytes_per_token
    recurrent, convolutions = 34 * 64 * 128 * 128 * 4, 34 * 3 * 3 * 64 * 128 * 2
    open_pools = 11 * (pool - 1) * 2 * 128 * 2
    assert sum(part.num_bytes for part in layout.slot_parts) == recurrent + convolutions + open_pools


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"index_kpool": 3}, "index_topk"),
        ({"qk_rope_head_dim": 8}, "qk_rope_head_dim"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail"),
        ({"linear_lower_bound": 5.0}, "linear_lower_bound"),
        ({"indexer_types": ["shared"] * 4}, "indexer_types"),
        ({"layer_types": ["linear_attention"]}, "layer_types"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_by_the_name_of_its_key(changes, key):
    with pytest.raises(ConfigError, match=key):
        build_dummy(
            {"model_type": "glm5_next", "text_config": TINY | changes},
            BuildOptions(torch.float32, torch.device("meta"), 64),
        )


def test_a_pool_that_does_not_divide_the_block_is_refused():
    text = TINY | {"index_kpool": 16, "index_topk": 32}
    model = build_dummy(
        {"model_type": "glm5_next", "text_config": text}, BuildOptions(torch.float32, torch.device("cpu"), 8)
    )
    with pytest.raises(ValueError, match="16 tokens a row do not divide"):
        model.layout(8)
