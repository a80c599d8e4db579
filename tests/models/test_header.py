"""A safetensors header is believed in nothing that has not been checked."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from daemon.weights.errors import CheckpointError
from daemon.weights.header import MAX_HEADER_BYTES, read_header


def write(path, header, data=b"", *, header_bytes=None):
    """A file with this header, whatever it claims."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if header_bytes is None else header_bytes
    path.write_bytes(length.to_bytes(8, "little") + text + data)
    return path


def entry(begin, end, *, dtype="F32", shape=None):
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_sound_file_is_read_in_the_order_of_its_bytes(tmp_path):
    tensors = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(4, dtype=torch.bfloat16), "empty": torch.ones(0, 3)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    entries = read_header(tmp_path / "x.safetensors")
    assert {e.name: e.shape for e in entries} == {"b": (2, 3), "a": (4,), "empty": (0, 3)}
    assert [e.offset for e in entries] == sorted(e.offset for e in entries)
    content = (tmp_path / "x.safetensors").read_bytes()
    b = next(e for e in entries if e.name == "b")
    assert torch.frombuffer(bytearray(content[b.offset : b.offset + b.num_bytes]), dtype=b.dtype).tolist() == [
        0.0, 1.0, 2.0, 3.0, 4.0, 5.0,
    ]  # fmt: skip


HOSTILE = {
    "a header longer than the file": (lambda p: write(p, {}, header_bytes=1 << 20), "truncated"),
    "a header length past the limit": (lambda p: write(p, {}, header_bytes=MAX_HEADER_BYTES + 1), "limit"),
    "the largest header length there is": (lambda p: write(p, {}, header_bytes=2**64 - 1), "limit"),
    "no header": (lambda p: p.write_bytes(b"1234"), "shorter"),
    "a header that is not JSON": (lambda p: write(p, b"{..."), "not JSON"),
    "a header that is not UTF-8": (lambda p: write(p, b'{"\xff\xfe": 1}'), "not JSON"),
    "a header that is a list": (lambda p: write(p, []), "not a JSON object"),
    "a header nested without end": (lambda p: write(p, b"[" * 200_000), "not JSON"),
    "a tensor named twice": (lambda p: write(p, b'{"a": {}, "a": {}}'), "twice"),
    "a tensor past the end": (lambda p: write(p, {"a": entry(0, 16)}, b"0" * 12), "truncated"),
    "tensors that overlap": (lambda p: write(p, {"a": entry(0, 8), "b": entry(4, 12)}, b"0" * 12), "overlaps"),
    "offsets in the wrong order": (lambda p: write(p, {"a": entry(8, 4, shape=[1])}, b"0" * 12), "offsets"),
    "a negative offset": (lambda p: write(p, {"a": entry(-4, 0)}, b"0" * 12), "offsets"),
    "an offset that is a float": (lambda p: write(p, {"a": entry(0.0, 4.0, shape=[1])}, b"0" * 12), "offsets"),
    "a shape unlike its bytes": (lambda p: write(p, {"a": entry(0, 8, shape=[3])}, b"0" * 12), "make 12 bytes"),
    "a negative dimension": (lambda p: write(p, {"a": entry(0, 8, shape=[-1, -2])}, b"0" * 12), "shape"),
    "a dimension that is a bool": (lambda p: write(p, {"a": entry(0, 4, shape=[True])}, b"0" * 12), "shape"),
    "a shape whose product overflows": (lambda p: write(p, {"a": entry(0, 0, shape=[2**62, 2**62])}), "bytes"),
    "very many dimensions": (lambda p: write(p, {"a": entry(0, 4, shape=[1] * 100)}, b"0" * 4), "shape"),
    "an unknown dtype": (lambda p: write(p, {"a": entry(0, 8, dtype="Q4")}, b"0" * 12), "dtype"),
    "an entry that is not an object": (lambda p: write(p, {"a": 1}), "object"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_a_clear_error(tmp_path, name):
    make, what = HOSTILE[name]
    path = tmp_path / "model.safetensors"
    make(path)
    with pytest.raises(CheckpointError, match=what) as caught:
        read_header(path)
    assert str(tmp_path) not in str(caught.value)


def test_a_file_that_is_not_there_is_a_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "model.safetensors")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_damage_is_an_error_or_a_header_inside_the_file(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("x") / "model.safetensors"
    save_file({"a": torch.ones(3, 2), "b": torch.ones(5)}, path)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    path.write_bytes(content)
    try:
        entries = read_header(path)
    except CheckpointError:
        return
    for e in entries:
        assert 0 <= e.offset <= e.offset + e.num_bytes <= len(content)
