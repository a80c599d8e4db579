"""DeepSeek-V3.2 and GLM-5: their state, and the extremes of selecting and routing."""

import pytest
import torch

from daemon.layers.parameters import Parameters
from daemon.models.base import BuildOptions
from daemon.models.fields import Fields
from daemon.models.load import build_dummy, build_model
from daemon.weights.errors import ConfigError
from tests.parity.checkpoints import tokens
from tests.parity.driver import Driver
from tests.parity.matrix import SelectionGaps, assert_same_state, check_chunks, our_state, their_cache

REAL = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "n_group": 8,
    "topk_group": 4,
    "max_position_embeddings": 163840,
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
    "n_group": 2,
    "topk_group": 1,
}


def meta_options() -> BuildOptions:
    return BuildOptions(torch.bfloat16, torch.device("meta"), 64)


def equal_scores(model) -> None:
    """Every key of every indexer scores 0."""
    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.weights_proj.weight.zero_()


def three_experts_take_all(model) -> None:
    """All tokens to the same three experts, none to the others."""
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.e_score_correction_bias.copy_(torch.tensor([90.0, 80.0, 70.0] + [0.0] * 5))


@pytest.mark.parametrize("sizes", [[37], [1, 1, 2, 33]], ids=str)
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_latents_and_index_keys_are_theirs(sparse_pairs, name, sizes):
    pair, text = sparse_pairs(name), tokens(37)
    expected = {}
    for i, layer in enumerate(their_cache(pair, text).layers):
        expected[f"layers.{i}.latent"] = torch.cat((layer.keys[0, 0], layer.values[0, 0]), dim=-1)
        if layer.indexer_keys is not None:
            expected[f"layers.{i}.index_k"] = layer.indexer_keys[0]
    assert_same_state(our_state(pair, text, sizes), expected)


@pytest.mark.parametrize("sizes", [[37], [16, 16, 1, 1, 3]], ids=str)
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_where_all_scores_tie_both_keep_the_first_tokens(sparse_pairs, name, sizes):
    gaps = SelectionGaps()
    with gaps.watch():
        check_chunks(sparse_pairs(name, equal_scores), sizes)
    assert gaps.num_ties > 20
    assert not gaps.gaps


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_experts_without_a_token_and_experts_with_all_of_them_give_their_logits(sparse_pairs, name):
    check_chunks(sparse_pairs(name, three_experts_take_all), [20, 17])


@pytest.mark.parametrize(
    ("family", "num_layers", "bytes_per_token"), [("deepseek_v32", 61, 85_888), ("glm_moe_dsa", 78, 109_824)]
)
def test_the_real_model_keeps_the_bytes_a_token_that_it_should(family, num_layers, bytes_per_token):
    fields = Fields(REAL | {"model_type": family, "num_hidden_layers": num_layers})
    model = build_model(fields, meta_options(), Parameters(torch.device("meta"), torch.bfloat16))
    layout = model.layout(64)
    assert layout.bytes_per_token == bytes_per_token
    assert layout.slots == ()


def test_a_layer_that_shares_a_selection_has_no_keys_of_its_own():
    kinds = {"indexer_types": ["full", "shared", "shared", "full"], "model_type": "glm_moe_dsa"}
    model = build_dummy(TINY | kinds, BuildOptions(torch.float32, torch.device("cpu"), 16))
    planes = [plane.name for plane in model.layout(16).planes if plane.name.endswith("index_k")]
    assert planes == ["layers.0.index_k", "layers.3.index_k"]
    driver = Driver(model, block_size=16)
    assert driver.chunk(driver.add(), tokens(20)).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"n_group": 3}, "n_group"),
        ({"topk_group": 3}, "n_group"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"indexer_types": ["shared"] * 4}, "indexer_types"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
        ({"attention_bias": True}, "attention_bias"),
        ({"index_head_dim": 32}, "index_head_dim"),
        ({"q_lora_rank": None}, "q_lora_rank"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_by_the_name_of_its_key(changes, key):
    with pytest.raises(ConfigError, match=key):
        build_dummy(TINY | {"model_type": "glm_moe_dsa"} | changes, meta_options())
