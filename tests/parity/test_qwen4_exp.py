"""Qwen4: its state, its n-grams, and the table that stays on disk."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from daemon.batch import SequenceRows, make_batch
from daemon.layers.ngram_table import NgramTable
from daemon.layers.parameters import Parameters
from daemon.models import ngram_tables
from daemon.models.base import BuildOptions
from daemon.models.fields import Fields
from daemon.models.load import build_dummy, build_model
from daemon.models.qwen4_exp import Qwen4Exp
from daemon.weights.errors import CheckpointError, ConfigError
from tests.parity.checkpoints import BLOCK_SIZE, GRID, Pair, load, tokens
from tests.parity.driver import Driver
from tests.parity.matrix import (
    SelectionGaps,
    assert_close,
    assert_same_state,
    check_chunks,
    our_state,
    their_cache,
)

EOS = 2
REAL = {
    "model_type": "qwen4_exp",
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "moe_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [1],
    "eos_token_id": EOS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
TINY = REAL | {
    "vocab_size": 131,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "num_attention_heads": 4,
    "moe_intermediate_size": 32,
    "num_experts": 16,
    "shared_expert_intermediate_size": 32,
    "hc_lowrank": 8,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "ngram_vocab_size_base": 1000,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def ours(pair: Pair) -> Qwen4Exp:
    """The model, with what only this family has."""
    assert isinstance(pair.ours, Qwen4Exp)
    return pair.ours


def opened(folder: Path) -> Qwen4Exp:
    model = load(folder)
    assert isinstance(model, Qwen4Exp)
    return model


def tables_of(model: Qwen4Exp) -> list[NgramTable]:
    tables = [ple.table for ple in model.ples if isinstance(ple.table, NgramTable)]
    assert len(tables) == len(model.ples) == 2
    return tables


def with_ends(count: int) -> list[int]:
    """A text with end tokens beside each other, at borders of chunks and as first token."""
    text = tokens(count, seed=3)
    for position in (0, 5, 6, 16, 18, 19, 30):
        if position < count:
            text[position] = EOS
    return text


def equal_scores(model) -> None:
    """Every block of every indexer scores 0."""
    for layer in model.model.layers:
        if hasattr(layer, "self_attn"):
            layer.self_attn.indexer.index_qk_proj.weight[: 16 * 16].zero_()


@pytest.mark.parametrize("sizes", [[38], [20, 18], [1, 1, 2, 34]], ids=str)
def test_keys_pooled_keys_open_pools_recurrences_and_ngrams_are_theirs(sparse_pairs, sizes):
    pair, text = sparse_pairs("qwen4_exp"), with_ends(38)
    body = pair.theirs.model
    cos, sin = body.rotary_emb(torch.zeros(1), torch.arange(0, 36, 4).view(1, 1, -1).expand(3, 1, -1))
    expected = {}
    for i, layer in enumerate(their_cache(pair, text).layers):
        if hasattr(layer, "recurrent_states"):
            expected[f"layers.{i}.conv"] = layer.conv_states[0][0, :, -3:].T
            expected[f"layers.{i}.recurrent"] = layer.recurrent_states[0][0]
            expected[f"layers.{i}.ple_conv"] = layer.conv_states[1][0].T
            expected[f"layers.{i}.ngram_ids"] = layer.conv_states[2][0]
            continue
        expected[f"layers.{i}.k"] = layer.keys[0].transpose(0, 1)
        expected[f"layers.{i}.v"] = layer.values[0].transpose(0, 1)
        raw = layer.indexer_keys[0]
        with torch.inference_mode():
            keys = body.layers[i].self_attn.indexer.k_layernorm(raw[:36].view(9, 4, 16).mean(dim=1))
        first, second, rest = keys.split((4, 4, 8), dim=-1)
        half_cos, half_sin = cos[0, :, :4], sin[0, :, :4]
        turned = (first * half_cos - second * half_sin, second * half_cos + first * half_sin, rest)
        expected[f"layers.{i}.index_k"] = torch.cat(turned, dim=-1)
        expected[f"layers.{i}.index_tail"] = torch.cat((raw[36:], torch.zeros(1, 16)))
    assert expected["layers.0.ngram_ids"].tolist() == text[-2:]
    assert_same_state(our_state(pair, text, sizes), expected)


@pytest.mark.parametrize("sizes", [[37], [16, 16, 5], [1] * 8 + [29], [17, 2, 18]], ids=str)
def test_end_tokens_in_the_ngram_history_give_their_logits(sparse_pairs, sizes):
    pair, text = sparse_pairs("qwen4_exp"), with_ends(37)
    driver = Driver(pair.ours, block_size=BLOCK_SIZE)
    assert_close(driver.chunks(driver.add(), text, sizes), pair.expected(text))


def test_end_tokens_while_decoding_give_their_logits(sparse_pairs):
    pair, text = sparse_pairs("qwen4_exp"), with_ends(37)
    driver = Driver(pair.ours, block_size=BLOCK_SIZE)
    sequence = driver.add()
    logits = [driver.chunk(sequence, text[:3])]
    logits += [driver.step([(sequence, [token])]) for token in text[3:]]
    assert_close(torch.cat(logits), pair.expected(text))


@pytest.mark.parametrize("sizes", [[40], [20, 20], [16, 16, 1, 1, 6]], ids=str)
def test_where_all_scores_tie_both_keep_the_first_blocks(sparse_pairs, sizes):
    gaps = SelectionGaps()
    with gaps.watch():
        check_chunks(sparse_pairs("qwen4_exp", equal_scores), sizes)
    assert gaps.num_ties > 20
    assert not gaps.gaps


def test_a_cache_of_five_rows_serves_a_table_of_thousands(sparse_pairs, monkeypatch):
    pair = sparse_pairs("qwen4_exp")
    first = ours(pair).ples[0].table
    assert isinstance(first, NgramTable)
    row_bytes = first.row.num_bytes
    monkeypatch.setattr(ngram_tables, "CACHE_BYTES", 5 * row_bytes)
    small = opened(pair.folder)
    for sizes in ([37], [16, 16, 5]):
        prompt = tokens(37)
        driver = Driver(small, block_size=BLOCK_SIZE)
        assert_close(driver.chunks(driver.add(), prompt, sizes), pair.expected(prompt))
    for table in tables_of(small):
        table.check()
        assert table.num_rows > 8000
        assert table.num_cached == 5
        assert table.num_read > 37 * 8
    small.close()


def test_staging_may_be_repeated_and_advances_nothing(sparse_pairs):
    model, text = ours(sparse_pairs("qwen4_exp")), tokens(40, seed=5)
    plain, staged = (Driver(model, block_size=BLOCK_SIZE) for _ in range(2))
    sequences = plain.add(), staged.add()
    for driver, sequence in zip((plain, staged), sequences, strict=True):
        driver.chunk(sequence, text[:18])
    kept = staged.state(sequences[1])
    table = list(sequences[1].block_table) + staged.free_blocks[-4:]
    rows = SequenceRows(text[18:34], 18, table, sequences[1].slot, staged.shadow)
    batch = make_batch([rows], BLOCK_SIZE, model.facts.device)
    for _ in range(3):
        for ple in model.ples:
            found = ple.table.finish(ple.stage(batch, staged.pools))
            assert found.shape == (16, 8, 8)
    assert all(torch.equal(kept[part], now) for part, now in staged.state(sequences[1]).items())
    assert torch.equal(staged.chunk(sequences[1], text[18:34]), plain.chunk(sequences[0], text[18:34]))


def test_a_chunk_that_was_prefetched_reads_nothing(sparse_pairs):
    model = opened(sparse_pairs("qwen4_exp").folder)
    text = with_ends(2 * GRID)
    driver = Driver(model, block_size=BLOCK_SIZE)
    sequence = driver.add()
    driver.chunk(sequence, text[:GRID])
    before = [table.num_read for table in tables_of(model)]
    model.prefetch(text[:GRID], text[GRID:])
    ahead = [table.num_read for table in tables_of(model)]
    driver.chunk(sequence, text[GRID:])
    assert all(now > then for now, then in zip(ahead, before, strict=True))
    assert [table.num_read for table in tables_of(model)] == ahead
    model.close()


def test_what_needs_the_host_says_so(sparse_pairs):
    assert not sparse_pairs("qwen4_exp").ours.caps.no_host_stage
    assert sparse_pairs("qwen4_exp without n-grams").ours.caps.no_host_stage


def test_constants_worked_out_are_those_of_the_checkpoint(sparse_pairs):
    pair = sparse_pairs("qwen4_exp 4-grams, wide blocks")
    for index, ple in enumerate(ours(pair).ples):
        config = ngram_tables.NgramConfig(131, EOS, 4, 4, 1000, 1234, 8)
        worked_out = ngram_tables.ngram_hash(config, index)
        assert torch.equal(worked_out.multipliers, ple.hash.multipliers)
        assert torch.equal(worked_out.head_sizes, ple.hash.head_sizes)
        assert torch.equal(worked_out.head_offsets, ple.hash.head_offsets)


def _without(name):
    return lambda tensors: tensors.pop(name)


SHARDS = "model.layers.0.ple.ple_embedding.ngram_embedding.shard_"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without(f"{SHARDS}1.weight"), "lacks shards"),
        (_without(f"{SHARDS}3.weight"), "fewer than its heads name"),
        (lambda tensors: tensors.update({f"{SHARDS}2.weight": torch.zeros(2054, 9)}), "another kind"),
        (_without("model.layers.0.ple.ple_embedding.layer_multipliers"), "lacks"),
        (
            lambda tensors: tensors["model.layers.0.ple.ple_embedding.ngram_heads_vocab_sizes"].zero_(),
            "a head without rows",
        ),
    ],
)
def test_a_table_that_does_not_fit_is_refused(sparse_pairs, tmp_path, damage, message):
    pair = sparse_pairs("qwen4_exp")
    tensors = load_file(pair.folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((pair.folder / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_the_real_model_keeps_the_bytes_that_it_should():
    options = BuildOptions(torch.bfloat16, torch.device("meta"), 64)
    layout = build_model(Fields(REAL), options, Parameters(torch.device("meta"), torch.bfloat16)).layout(64)
    assert layout.bytes_per_token == 12 * (2048 + 128 * 2 // 4)
    sizes = {part.name: part.num_bytes for part in layout.slot_parts}
    assert sizes["layers.0.ple_conv"] == 9 * 4 * 2048 * 2
    assert sizes["layers.0.ngram_ids"] == 16
    assert 74e6 < sum(sizes[name] for name in sizes if name.endswith("recurrent")) < 76e6


def test_made_up_weights_need_no_table_on_disk():
    model = build_dummy(TINY, BuildOptions(torch.float32, torch.device("cpu"), 16))
    driver = Driver(model, block_size=BLOCK_SIZE)
    check = driver.chunks(driver.add(), tokens(20), [16, 4])
    assert check.isfinite().all()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"indexer_budget": 9}, "indexer_budget"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads"),
        ({"indexer_head_dim": 8}, "indexer_head_dim"),
        ({"ple_layer_ids": [5]}, "ple_layer_ids"),
        ({"ple_embed_dim": 63}, "ple_embed_dim"),
        ({"eos_token_id": None}, "eos_token_id"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type"),
        ({"linear_num_key_heads": 3}, "linear_num_value_heads"),
        ({"layer_types": ["linear_attention"]}, "layer_types"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_by_the_name_of_its_key(changes, key):
    with pytest.raises(ConfigError, match=key):
        build_dummy(TINY | changes, BuildOptions(torch.float32, torch.device("meta"), 64))


def test_end_tokens_of_every_part_end_a_text_and_the_first_of_the_text_stops_ngrams(sparse_pairs, tmp_path):
    pair = sparse_pairs("qwen4_exp beside a vision tower")
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((pair.folder / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    model = opened(tmp_path)
    assert model.facts.eos_token_ids == (1, EOS, 7)
    assert [ple.hash.eos_id for ple in model.ples] == [EOS, EOS]
    model.close()
