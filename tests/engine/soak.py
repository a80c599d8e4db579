"""One engine with all tiers on the CPU, many small requests, and what they leave: run as a process of its own.

It reads one JSON job from its standard input and writes one JSON list of samples, taken when nothing is open: the first
after a warm-up that fills every tier, then at equal distances over the soak, the last after a storm of cancels.
"""

import ctypes
import gc
import json
import os
import random
import subprocess
import sys
import time
import tracemalloc
from array import array
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from daemon import memory
from daemon.engine.engine import Engine
from daemon.engine.start import start
from daemon.messages import Abort, Answer, Query, QueryKind, Rejected, SamplingParams, Submit, ToFront
from tests.exact.checkpoint import write_checkpoint
from tests.exact.families import GRID, VOCAB_SIZE, config_of
from tiers.store import DiskStore
from tiers.tree import PrefixTree

FAMILY = "qwen3_5"
OPEN_AT_A_TIME = 8
NUM_PREFIXES = 1500  # more than any tier holds
NUM_KEYS = 4096  # of the remembered past, which is full after any warm-up, not after 300,000 requests
# Parts of paths are interned, and their table grows once in a process's life, from 2 MiB to 4, when so many have come
# and gone; which may be after 80,000 requests.
NUM_INTERNED = 200_000
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Job:
    """How much, and of what."""

    folder: str  # for the model and the disk tier
    pool_bytes: int
    host_bytes: int
    disk_bytes: int
    num_warmup: int
    num_requests: int
    num_cancels: int
    num_samples: int
    is_traced: bool  # Python's own allocations too; costs memory and time
    seed: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The process and its files at one moment of rest."""

    requests: int
    cancelled: int
    imports_bytes: int  # resident before the engine was made
    resident_bytes: int
    page_cache_bytes: int  # of the disk tier's files
    weight_bytes: int
    device_bytes: int  # of the ledger, weights not counted
    host_bytes: int
    buffer_bytes: int  # that the store declares
    traced_bytes: int
    heap_bytes: int  # that the C allocator has given out, of what it has
    num_allocated: int  # small objects of Python; a list of them would move the heap that is looked at
    num_handles: int
    num_threads: int
    num_files: int
    disk_bytes: int
    index_bytes: int
    num_nodes: int
    num_bare_nodes: int  # of them, ends of paths that no tier has anything of
    hit_tokens: tuple[int, int, int]  # device, host, disk
    evicted: tuple[int, int, int]
    findings: tuple[str, ...]

    @property
    def charged_bytes(self) -> int:
        """What the system has given: resident memory, and the page cache of the tier's files."""
        return self.resident_bytes + self.page_cache_bytes

    @property
    def declared_bytes(self) -> int:
        """What the books say: weights, and every byte of device and host."""
        return self.weight_bytes + self.device_bytes + self.host_bytes


class Soak:
    """Feeds the engine and looks at it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        if job.is_traced:  # from here on: what was there before would come in as it is replaced
            tracemalloc.start(1)
        self.rng = random.Random(job.seed)
        for number in range(NUM_INTERNED):
            sys.intern(f"no part of a path {number}")
        self.imports_bytes = resident_bytes()
        self.disk = Path(job.folder) / "disk"
        two_layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
        write_checkpoint(FAMILY, Path(job.folder) / "models" / FAMILY, **two_layers)
        config = config_of(
            FAMILY,
            Path(job.folder) / "models",
            "float32",
            pool_bytes=job.pool_bytes,
            host_bytes=job.host_bytes,
            disk_path=str(self.disk),
            disk_bytes=job.disk_bytes,
            max_sequences=OPEN_AT_A_TIME,
            growth_window=16,
        )
        self.answers: list[Answer] = []
        self.engine: Engine
        self.engine, _ = start(config, send=self._receive, progress=lambda done, total: None)
        self.engine.cache.history.num_keys = NUM_KEYS
        self.num_requests = 0
        self.num_cancelled = 0

    def run(self) -> list[Sample]:
        job = self.job
        samples: list[Sample] = []
        self.serve(job.num_warmup)
        self._look(samples)
        for _ in range(job.num_samples):
            self.serve(job.num_requests // job.num_samples)
            self._look(samples)
        if job.num_cancels:
            self.cancel(job.num_cancels)
            self._look(samples)
        return samples

    def _look(self, samples: list[Sample]) -> None:
        """One more sample, and a line for who waits for the end."""
        samples.append(sample := self.sample())
        growth = sample.charged_bytes / samples[0].charged_bytes - 1
        print(
            f"{sample.requests} requests, {sample.cancelled} cancelled: "
            f"{sample.charged_bytes >> 10} KiB charged ({growth:+.2%}), {sample.disk_bytes >> 20} MiB on disk",
            file=sys.stderr,
            flush=True,
        )

    def serve(self, num_requests: int) -> None:
        """So many requests from beginning to end, several at a time."""
        left = num_requests
        while left or not self._is_at_rest():
            while left and len(self.engine.requests) < OPEN_AT_A_TIME:
                self._submit()
                left -= 1
            self._step()

    def cancel(self, num_cancels: int) -> None:
        """So many requests cancelled wherever they are, among others that are not."""
        until = self.num_cancelled + num_cancels
        while self.num_cancelled < until or not self._is_at_rest():
            if self.num_cancelled < until and len(self.engine.requests) < 2 * OPEN_AT_A_TIME:
                self._submit()
            self._step()
            for name in [name for name in self.engine.requests if self.rng.random() < 0.4]:
                if self.num_cancelled < until:
                    self.engine.handle(Abort(name))
                    self.num_cancelled += 1

    def sample(self) -> Sample:
        """Everything at rest, as the engine's process is after a second. The books are asked for through the ledger."""
        gc.collect()
        memory.trim()
        engine, store = self.engine, self._store()
        engine.handle(Query(1, QueryKind.LEDGER))
        ledger = self.answers.pop()
        device_bytes = sum(row.bytes for row in ledger.ledger if row.tier == "device")
        disk, host = engine.cache.disk, engine.cache.host
        assert disk is not None
        assert host is not None
        return Sample(
            requests=self.num_requests,
            cancelled=self.num_cancelled,
            imports_bytes=self.imports_bytes,
            resident_bytes=resident_bytes(),
            page_cache_bytes=page_cache_bytes(self.disk),
            weight_bytes=engine.model.facts.weight_bytes,
            device_bytes=device_bytes - engine.model.facts.weight_bytes,
            host_bytes=sum(row.bytes for row in ledger.ledger if row.tier == "host"),
            buffer_bytes=store.buffer_bytes,
            traced_bytes=tracemalloc.get_traced_memory()[0] if self.job.is_traced else 0,
            heap_bytes=heap_bytes(),
            num_allocated=sys.getallocatedblocks(),
            num_handles=len(os.listdir("/proc/self/fd")),
            num_threads=len(os.listdir("/proc/self/task")),
            num_files=sum(path.is_file() for path in self.disk.rglob("*")),
            disk_bytes=store.usage_bytes,
            index_bytes=sum(path.stat().st_blocks * 512 for path in self.disk.glob("index*")),
            num_nodes=engine.device.tree.num_nodes,
            num_bare_nodes=_num_bare(engine.device.tree),
            hit_tokens=(engine.device.stats.hit_tokens, host.stats.hit_tokens, disk.stats.hit_tokens),
            evicted=(engine.device.stats.evicted_blocks, host.stats.evicted_copies, disk.stats.evicted_records),
            findings=ledger.findings,
        )

    def _submit(self) -> None:
        """One of many prefixes, followed by something of its own; few tokens of answer."""
        rng = self.rng
        number = min(rng.randrange(NUM_PREFIXES), rng.randrange(NUM_PREFIXES))  # some are used more than others
        shared = random.Random(number)
        prompt = [shared.randrange(3, VOCAB_SIZE) for _ in range(shared.randint(2, 8) * GRID)]
        tail_len = rng.randint(1, GRID - 1) if rng.random() < 0.9 else rng.randint(GRID, 2 * GRID)
        prompt += [rng.randrange(3, VOCAB_SIZE) for _ in range(tail_len)]
        self.num_requests += 1
        sampling = SamplingParams(seed=0, temperature=0.0)
        ids = array("i", prompt).tobytes()
        n = rng.choice((1, 1, 1, 2))
        self.engine.handle(
            Submit(f"s{self.num_requests}", ids, n, rng.randint(1, 3), 0, (), sampling, f"ns{number % 3}")
        )

    def _step(self) -> None:
        with torch.inference_mode():
            self.engine.step()
        if self.engine.only_waits:
            time.sleep(0.0005)

    def _is_at_rest(self) -> bool:
        return self.engine.is_idle and self.engine.cache.is_settled

    def _store(self) -> DiskStore:
        assert self.engine.cache.disk is not None
        store = self.engine.cache.disk.store
        assert isinstance(store, DiskStore)
        return store

    def _receive(self, message: ToFront) -> None:
        assert not isinstance(message, Rejected), message
        if isinstance(message, Answer):
            self.answers.append(message)


def _num_bare(tree: PrefixTree) -> int:
    """Ends of paths that no tier has the block or the state of."""
    return sum(not (node.children or node.has_block or node.has_state) for node in tree.nodes())


def resident_bytes() -> int:
    """Of this process, shared pages counted whole."""
    text = Path("/proc/self/smaps_rollup").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("Rss:"))
    return int(line.split()[1]) * 1024


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def heap_bytes() -> int:
    """Given out by the C allocator, mapped blocks too; 0 where it does not say."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def page_cache_bytes(folder: Path) -> int:
    """Pages of the files below a folder that the system keeps in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    total = 0
    for path in folder.rglob("*"):
        if not path.is_file() or not path.stat().st_size:
            continue
        mapped = np.memmap(path, mode="r")
        pages = np.zeros(-(-mapped.size // PAGE_BYTES), np.uint8)
        assert libc.mincore(mapped.ctypes.data, mapped.size, pages.ctypes.data) == 0, os.strerror(ctypes.get_errno())
        total += int((pages & 1).sum()) * PAGE_BYTES
    return total


def run_job(job: Job) -> list[Sample]:
    """A job in a process of its own, which tells on the standard error stream how far it is."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.soak"], input=json.dumps(asdict(job)), stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == 0
    return msgspec.json.decode(done.stdout, type=list[Sample])


def main() -> None:
    """One job to its end."""
    soak = Soak(Job(**json.load(sys.stdin)))
    samples = soak.run()
    soak.engine.close()
    json.dump([asdict(sample) for sample in samples], sys.stdout)


if __name__ == "__main__":
    main()
