"""A real daemon in a process of its own, with a tiny model made from a seed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from downcore.v1 import admin_pb2, admin_pb2_grpc, generation_pb2_grpc
from downcore.v1 import generation_pb2 as pb

from tests.front.harness import write_model_folder

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 0,
    "torch_dtype": "float32",
}
TINY_FLAGS = ("--load-format", "dummy", "--dtype", "float32", "--block-size", "16", "--grid", "64", "--threads", "1")


class Daemon:
    """`python -m daemon` on a Unix socket of its own."""

    def __init__(self, folder: Path, model: Path, *flags: str, log: Path | None = None) -> None:
        self.socket = folder / "d.sock"
        command = [sys.executable, "-m", "daemon", "--model", str(model), "--listen", str(self.socket), *flags]
        self.log = log or folder / "daemon.log"
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sink, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("downcore ready:"), self.log.read_text()[-4000:]
        self.ready_line = line
        self.channel = self.new_channel()
        self.generation = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)

    def new_channel(self) -> grpc.Channel:
        return grpc.insecure_channel(f"unix:{self.socket}", options=(("grpc.use_local_subchannel_pool", 1),))

    def generate(self, timeout: float = 120, **fields: Any) -> list[pb.GenerateResponse]:
        """The whole stream of one request."""
        return list(self.generation.Generate(pb.GenerateRequest(**fields), timeout=timeout))

    def info(self) -> admin_pb2.GetServerInfoResponse:
        return self.admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=10)

    def tier(self) -> admin_pb2.Tier:
        return self.admin.ListTiers(admin_pb2.ListTiersRequest(), timeout=10).tiers[0]

    def ledger(self) -> admin_pb2.GetLedgerResponse:
        return self.admin.GetLedger(admin_pb2.GetLedgerRequest(), timeout=10)

    def sequences(self) -> list[admin_pb2.Sequence]:
        return list(self.admin.ListSequences(admin_pb2.ListSequencesRequest(), timeout=10).sequences)

    def wait_idle(self, timeout_s: float = 60) -> None:
        """Returns once no sequence is left."""
        end = time.monotonic() + timeout_s
        while self.sequences():
            assert time.monotonic() < end, "still busy"

    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def num_threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def resident_bytes(self) -> int:
        """Resident memory of the front."""
        text = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        (line,) = (line for line in text.splitlines() if line.startswith("Rss:"))
        return int(line.split()[1]) * 1024

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.channel.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


def crowd() -> float:
    """How many want each core, at least one: so much longer than alone may something take."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@contextmanager
def running(folder: Path, model: Path, *flags: str) -> Generator[Daemon]:
    """A ready daemon, which must end with status 0."""
    daemon = Daemon(folder, model, *flags)
    try:
        yield daemon
    finally:
        status = daemon.stop()
    assert status == 0, daemon.log.read_text()[-4000:]


def tiny_model(folder: Path, **changes: object) -> Path:
    """A model folder without weights: byte-level tokenizer, and a configuration for `--load-format dummy`."""
    write_model_folder(folder)
    (folder / "config.json").write_text(json.dumps({**TINY, **changes}))
    return folder


def tokens_of(responses: list[pb.GenerateResponse], index: int = 0) -> list[int]:
    return [t for r in responses if r.HasField("chunk") and r.chunk.index == index for t in r.chunk.token_ids]


def summary_of(responses: list[pb.GenerateResponse]) -> pb.GenerateSummary:
    assert responses[-1].HasField("summary")
    return responses[-1].summary
