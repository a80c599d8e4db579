"""A table on disk gives the rows of the table in memory, however small its cache, and says so when it cannot."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from daemon.layers.ngram_table import NgramTable, RowFormat, SeededTable, TableReadError, TableShard

DIM = 8


def data_offset(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def make(
    folder: Path, *, sizes: tuple[int, ...] = (100, 3, 57), dtype: torch.dtype = torch.bfloat16, cache_rows: int = 7
):
    """A table in one file a shard, its contents, and an open reader of it."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(sum(sizes), DIM, generator=generator).to(dtype)
    shards, start = [], 0
    for index, size in enumerate(sizes):
        path = folder / f"shard-{index}.safetensors"
        save_file({"weight": table[start : start + size].clone()}, path)
        shards.append(TableShard(path, data_offset(path), size))
        start += size
    return table, NgramTable(shards, RowFormat(dtype, DIM), cache_rows=cache_rows, num_threads=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_every_shard_are_those_of_the_table(tmp_path: Path, dtype: torch.dtype) -> None:
    table, reader = make(tmp_path, dtype=dtype)
    rows = torch.randperm(160, generator=torch.Generator().manual_seed(1)).view(10, 16)
    assert torch.equal(reader.finish(reader.start(rows)), table[rows])
    reader.check()
    reader.close()


def test_a_table_far_larger_than_its_cache_is_served_right_and_the_cache_stays_bounded(tmp_path: Path) -> None:
    table, reader = make(tmp_path, cache_rows=5)
    generator = torch.Generator().manual_seed(2)
    for _ in range(50):
        rows = torch.randint(0, 160, (4, 3), generator=generator)
        assert torch.equal(reader.finish(reader.start(rows)), table[rows])
        reader.check()
        assert reader.num_cached <= 5
    assert reader.num_read > 300
    reader.close()


def test_a_second_look_up_of_cached_rows_reads_nothing(tmp_path: Path) -> None:
    table, reader = make(tmp_path, cache_rows=10)
    rows = torch.tensor([[3, 150, 3], [7, 101, 3]])
    reader.finish(reader.start(rows))
    assert reader.num_read == 4
    assert torch.equal(reader.finish(reader.start(rows)), table[rows])
    assert reader.num_read == 4
    reader.close()


def test_the_least_recently_used_row_leaves_first(tmp_path: Path) -> None:
    _, reader = make(tmp_path, cache_rows=2)
    for row in (1, 2, 1, 3):  # 2 leaves
        reader.finish(reader.start(torch.tensor([row])))
    assert reader.num_read == 3
    reader.finish(reader.start(torch.tensor([1])))
    assert reader.num_read == 3
    reader.finish(reader.start(torch.tensor([2])))
    assert reader.num_read == 4
    reader.close()


def test_look_ups_under_way_together_each_get_their_rows(tmp_path: Path) -> None:
    table, reader = make(tmp_path, cache_rows=3)
    asked = [torch.arange(first, first + 40) for first in (0, 20, 110)]
    fetches = [reader.start(rows) for rows in asked]
    for rows, fetch in reversed(list(zip(asked, fetches, strict=True))):
        assert torch.equal(reader.finish(fetch), table[rows])
        reader.check()
    dropped = reader.start(torch.arange(160))  # never finished: nothing is owed
    assert torch.equal(reader.finish(reader.start(torch.arange(160))), table)
    assert dropped.rows.numel() == 160
    reader.close()


def test_a_file_shorter_than_its_rows_is_refused_and_leaves_no_file_open(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"x" * 100)
    with pytest.raises(TableReadError, match="shorter"):
        NgramTable([TableShard(path, 90, 1)], RowFormat(torch.float32, DIM), cache_rows=1, num_threads=1)
    with pytest.raises(TableReadError, match="No such file"):
        NgramTable([TableShard(tmp_path / "none", 0, 1)], RowFormat(torch.float32, DIM), cache_rows=1, num_threads=1)


def test_a_file_that_shrinks_under_the_reader_is_an_error_and_not_other_rows(tmp_path: Path) -> None:
    table, reader = make(tmp_path)
    with open(tmp_path / "shard-2.safetensors", "r+b") as file:
        file.truncate(60)
    with pytest.raises(TableReadError, match="whole"):
        reader.finish(reader.start(torch.tensor([159])))
    assert torch.equal(reader.finish(reader.start(torch.tensor([0, 102]))), table[[0, 102]])
    reader.close()
    reader.close()


def test_a_made_up_row_is_a_function_of_its_number_alone() -> None:
    table = SeededTable(RowFormat(torch.float32, DIM))
    whole = table.finish(table.start(torch.arange(50)))
    part = table.finish(table.start(torch.tensor([[7, 31], [31, 0]])))
    assert torch.equal(part, whole[torch.tensor([[7, 31], [31, 0]])])
    assert len({tuple(row) for row in whole.tolist()}) == 50


def test_a_table_with_other_rows_or_another_size_has_another_digest(tmp_path: Path) -> None:
    digests: list[bytes] = []
    for number, (values, num_rows) in enumerate(((1.0, 40), (1.0, 40), (2.0, 40), (1.0, 41))):
        path = tmp_path / f"t{number}"
        path.write_bytes(torch.full((num_rows, 3), values).numpy().tobytes())
        table = NgramTable([TableShard(path, 0, num_rows)], RowFormat(torch.float32, 3), cache_rows=4, num_threads=1)
        digests.append(table.digest())
        table.close()
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
