"""What the disk tier's choices rest on, measured: codings, ways of reading, and a restore from end to end.

`make campaign disk` writes its figures to results/disk.json; tiers/FORMAT.md quotes them. Rates are in MB (10^6 bytes)
of image per second unless they say coded. The images have the size of SmolLM2's blocks, and values that code as its K
and V do.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import aiofiles
import numpy as np
import zstandard
from numpy.typing import NDArray

from tests.tiers.stores import IDENTITY, Item, chain
from tiers.codec import ImageCodec
from tiers.files import OsFiles, aligned_buffer
from tiers.layout import Plane, StateLayout
from tiers.records import Identity, RecordKind
from tiers.store import DiskStore

RESULT = Path("tests/campaigns/results/disk.json")
NUM_BLOCKS = 96  # 6,144 tokens
NUM_THREADS = 2
REPEATS = 7
LAYOUT = StateLayout(
    tuple(Plane(f"layers.{i}.{kind}", "bfloat16", (3, 64)) for i in range(30) for kind in "kv"), (), 64
)
SMOLLM2 = Identity(IDENTITY.fingerprint, IDENTITY.profile, LAYOUT)

Bytes = NDArray[np.uint8]


def main() -> int:
    """Measures everything once; half a minute."""
    images = make_images(8)
    with tempfile.TemporaryDirectory(prefix="dc-disk-", dir=os.environ.get("DOWNCORE_DISK", "/tmp")) as folder:
        result = {
            "campaign": "disk",
            "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
            "cpu": cpu_name(),
            "zstd_levels": zstd_levels(images),
            "join_mb_per_s": join_forms(images),
            "read_coded_mb_per_s": asyncio.run(ways_to_read(Path(folder) / "file")),
            **restore(Path(folder) / "disk", images),
        }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


def make_images(number: int) -> list[Bytes]:
    """Normal values, each channel with a scale of its own."""
    rng = np.random.default_rng(1)
    scales = np.exp(0.7 * rng.standard_normal((60, 1, 192))).astype(np.float32)
    images: list[Bytes] = []
    for _ in range(number):
        values = rng.standard_normal((60, 64, 192)).astype(np.float32) * scales
        images.append(np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8).reshape(-1))
    return images


def zstd_levels(images: Sequence[Bytes]) -> dict[str, dict[str, float]]:
    """High bytes of whole images: what each level saves and costs. One thread."""
    high = [image[1::2].copy() for image in images]
    size = sum(image.nbytes for image in images)
    figures: dict[str, dict[str, float]] = {}
    for level in (-5, -1, 1, 3):
        compressor, decompressor = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
        frames = [compressor.compress(part.data) for part in high]
        figures[str(level)] = {
            "ratio": round(size / (size / 2 + sum(map(len, frames))), 3),
            "compress_mb_per_s": rate(size, lambda c=compressor: [c.compress(part.data) for part in high]),
            "decompress_mb_per_s": rate(size, lambda d=decompressor, f=frames: [d.decompress(frame) for frame in f]),
        }
    return figures


def join_forms(images: Sequence[Bytes]) -> dict[str, float]:
    """Ways to put high and low bytes together again. One thread."""
    high, low = images[0][1::2].copy(), images[0][0::2].copy()
    words = np.empty(len(high), np.uint16)
    scratch = np.empty(len(high), np.uint16)

    def every_other_byte() -> None:
        view = words.view(np.uint8)
        view[0::2], view[1::2] = low, high

    def widen_shift_or() -> None:
        np.copyto(scratch, high)
        np.left_shift(scratch, 8, out=scratch)
        np.copyto(words, low)
        np.bitwise_or(words, scratch, out=words)

    def multiply_add() -> None:
        np.multiply(high, 256, out=words, dtype=np.uint16)
        np.add(words, low, out=words)

    forms = {"every other byte": every_other_byte, "widen, shift, or": widen_shift_or, "multiply, add": multiply_add}
    figures = {name: rate(words.nbytes, form, inner=20) for name, form in forms.items()}
    assert np.array_equal(words.view(np.uint8), images[0])
    return figures


async def ways_to_read(path: Path) -> dict[str, float]:
    """100 MB in pieces of 4 MiB, past the page cache."""
    size, piece = 96 << 20, 4 << 20
    files = OsFiles()
    fd, direct = files.create(path, direct=True)
    buffers = [aligned_buffer(piece) for _ in range(4)]
    for at in range(0, size, piece):
        files.pwrite(fd, buffers[0], at)
    files.sync(fd)
    files.close(fd)

    def by_threads(number: int) -> None:
        def read(first: int) -> None:
            own = files.open_read(path, direct=direct)
            for at in range(first * piece, size, number * piece):
                files.pread(own, buffers[first], at)
            files.close(own)

        in_threads(number, read)

    async def by_aiofiles(number: int) -> None:
        async def read(first: int) -> None:
            opener = lambda name, flags: os.open(name, flags | os.O_DIRECT * direct)  # noqa: E731
            async with aiofiles.open(path, "rb", buffering=0, opener=opener) as file:
                for at in range(first * piece, size, number * piece):
                    await file.seek(at)
                    await file.readinto(buffers[first])

        await asyncio.gather(*(read(first) for first in range(number)))

    figures: dict[str, float] = {}
    for number in (1, 2, 4):
        figures[f"preadv, {number} threads"] = wall_rate(size, lambda n=number: by_threads(n))
        took: list[float] = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            await by_aiofiles(number)
            took.append(time.perf_counter() - began)
        figures[f"aiofiles, {number} tasks"] = round(size / 1e6 / statistics.median(took), 1)
    return figures


def restore(directory: Path, images: Sequence[Bytes]) -> dict[str, object]:
    """96 blocks from a store that was opened anew, and what its parts take alone."""
    heads = [item.head for item in chain(NUM_BLOCKS, identity=SMOLLM2)]
    items = [Item(head, images[number % len(images)].data) for number, head in enumerate(heads)]
    store = DiskStore.open(directory, SMOLLM2, quota_bytes=1 << 30)
    began = time.perf_counter()
    for start in range(0, NUM_BLOCKS, 24):
        store.write([item.pair for item in items[start : start + 24]])
    write_s = time.perf_counter() - began
    store.close()
    began = time.perf_counter()
    store = DiskStore.open(directory, SMOLLM2, quota_bytes=1 << 30)
    entries = list(store.entries())
    open_s = time.perf_counter() - began
    targets = [np.zeros(LAYOUT.block_bytes, np.uint8) for _ in entries]
    requests = [(entry.head, entry.ref, target.data) for entry, target in zip(entries, targets, strict=True)]
    took: list[float] = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        assert store.read(requests) == [None] * NUM_BLOCKS
        took.append(time.perf_counter() - began)
    assert all(np.array_equal(target, images[number % len(images)]) for number, target in enumerate(targets))
    store.close()
    coded_bytes = sum(entry.ref.stored_bytes for entry in entries)
    decode_s = decode_alone(images, targets)
    read_s = coded_bytes / 1e6 / wall_read_rate(directory, coded_bytes)
    return {
        "raw_bytes": NUM_BLOCKS * LAYOUT.block_bytes,
        "coded_bytes": coded_bytes,
        "write_s": round(write_s, 3),
        "open_s": round(open_s, 4),
        "read_alone_s": round(read_s, 3),
        "decode_alone_s": round(decode_s, 3),
        "restore_s": [round(seconds, 3) for seconds in sorted(took)],
        "bar_s": round(1.5 * max(read_s, decode_s) + 0.02, 3),
    }


def decode_alone(images: Sequence[Bytes], targets: Sequence[Bytes]) -> float:
    """Seconds to decode 96 images that are in memory, on two threads."""
    codec = ImageCodec(SMOLLM2.parts(RecordKind.BLOCK), LAYOUT.block_bytes)
    codings = codec.trial(images[0].data)
    coded: list[tuple[bytes, bytes, memoryview]] = []
    for image in images:
        out = memoryview(bytearray(codec.most_payload_bytes()))
        tables = codec.encode(image.data, codings, out)
        coded.append((tables.part_table, tables.stripe_table, out[: tables.payload_bytes]))

    def decode(first: int) -> None:
        for number in range(first, NUM_BLOCKS, NUM_THREADS):
            part_table, stripe_table, payload = coded[number % len(coded)]
            codec.decode(part_table, stripe_table, payload, targets[number].data)

    took: list[float] = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        in_threads(NUM_THREADS, decode)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def wall_read_rate(directory: Path, num_bytes: int) -> float:
    """MB/s of the store's own segments, read directly by two threads."""
    files, piece = OsFiles(), 4 << 20
    path = next((directory / "segments").iterdir())
    buffers = [aligned_buffer(piece) for _ in range(NUM_THREADS)]

    def read(first: int) -> None:
        fd = files.open_read(path, direct=True)
        for at in range(first * piece, num_bytes, NUM_THREADS * piece):
            files.pread(fd, buffers[first], at)
        files.close(fd)

    return wall_rate(num_bytes, lambda: in_threads(NUM_THREADS, read))


def in_threads(number: int, work: Callable[[int], None]) -> None:
    """Runs it on so many threads."""
    threads = [threading.Thread(target=work, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def rate(num_bytes: int, work: Callable[[], object], *, inner: int = 1) -> float:
    """MB/s of this thread's own time: the best of several."""
    took: list[float] = []
    for _ in range(REPEATS):
        began = time.thread_time()
        for _ in range(inner):
            work()
        took.append(time.thread_time() - began)
    return round(inner * num_bytes / 1e6 / min(took), 1)


def wall_rate(num_bytes: int, work: Callable[[], None]) -> float:
    """MB/s by the clock: the median of several."""
    took: list[float] = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return round(num_bytes / 1e6 / statistics.median(took), 1)


def cpu_name() -> str:
    """The processor, and how many of it."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{names[0]}, {os.cpu_count()} cores"


if __name__ == "__main__":
    sys.exit(main())
