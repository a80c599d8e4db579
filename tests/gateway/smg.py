"""The gateway (PyPI's smg) in a process of its own, before daemons that listen on loopback."""

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI

from tests.front.harness import eventually

NO_HUB = "http://127.0.0.1:9"


class Smg:
    """It routes by the blocks that its workers tell of. Its tokenizer is that of `model`, or else the workers'.

    Where it has none it looks for one on a hub before it asks its workers; here there is no hub to be reached.
    """

    def __init__(self, folder: Path, model: Path | None, workers: Sequence[str], *flags: str) -> None:
        self.port, self.metrics_port = free_ports(2)
        self.log = folder / f"smg-{self.port}.log"
        tokenizer = () if model is None else ("--model-path", str(model))
        command = [
            sys.executable, "-m", "smg.launch_router", "--host", "127.0.0.1", "--port", str(self.port),
            "--prometheus-host", "127.0.0.1", "--prometheus-port", str(self.metrics_port), "--log-level", "warn",
            "--policy", "cache_aware", "--disable-retries", *tokenizer,
            "--worker-urls", *(f"grpc://{worker}" for worker in workers), *flags,
        ]  # fmt: skip
        with self.log.open("ab") as sink:
            environment = {**os.environ, "HF_ENDPOINT": NO_HUB}
            self.process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment)
        self.openai = OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=60
        )  # fmt: skip

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return json.load(answer)

    def metric(self, name: str) -> dict[str, float]:
        """The samples of a metric by their labels, as the gateway shows them."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        found = (line.rpartition(" ") for line in lines if line.startswith((f"{name}{{", f"{name} ")))
        return {labels.removeprefix(name): float(value) for labels, _, value in found}

    def num_ready(self) -> int:
        """Workers that it routes to."""
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        try:
            return sum(worker["is_healthy"] for worker in self.get("/workers")["workers"])
        except OSError:  # it does not listen yet
            return 0

    def num_blocks(self) -> int:
        """Blocks that its index has, of all workers."""
        return int(sum(self.metric("smg_kv_index_blocks").values()))

    def stop(self) -> None:
        self.openai.close()
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def running_smg(folder: Path, model: Path | None, workers: Sequence[str], *flags: str) -> Generator[Smg]:
    """A gateway that has found all its workers, and a tokenizer."""
    smg = Smg(folder, model, workers, *flags)
    try:
        eventually(lambda: smg.num_ready() == len(workers), 40)
        eventually(lambda: bool(smg.get("/v1/tokenizers")["tokenizers"]), 20)
        yield smg
    finally:
        smg.stop()


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
