"""A front process with a scripted engine, and a client of it."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import grpc
from downcore.v1 import admin_pb2, admin_pb2_grpc, cache_pb2_grpc, generation_pb2_grpc
from downcore.v1 import generation_pb2 as pb
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

LAUNCH = Path(__file__).with_name("launch.py")
END = 0  # the end token, special
BYTE = 1  # the token of byte b is BYTE + b
# GLIBC_TUNABLES of a front whose memory is looked at. What each thread has freed and the C library keeps for it counts
# as allocated: up to seven chunks of 64 sizes, a bound that a storm reaches after some hundred thousand requests.
# Without these caches every byte counted is one in use.
NO_THREAD_CACHES = "glibc.malloc.tcache_count=0"
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"))
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.content == "hang" -%}
{%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- endif -%}
{%- if message.content == "grow" -%}{{ "x" * 100000000000 }}{%- endif -%}
{%- if message.content == "escape" -%}{{ "".__class__.__mro__[1].__subclasses__() }}{%- endif -%}
{%- if message.role == "stranger" -%}{{ raise_exception("no strangers") }}{%- endif -%}
<{{ message.role }}>{{ message.content }}
{%- endfor -%}
"""


def write_model_folder(folder: Path) -> Path:
    """A folder with a byte-level tokenizer of 260 tokens and a chat template that misbehaves on demand."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    vocab = {"<|end|>": END} | {spelled[byte]: BYTE + byte for byte in range(256)}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {
        "id": END, "content": "<|end|>", "special": True,
        "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
    }  # fmt: skip
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "vocab": vocab, "merges": [list(merge) for merge in MERGES],
    }  # fmt: skip
    spec = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def ids_of(text: str | bytes) -> list[int]:
    """One token a byte."""
    return [BYTE + byte for byte in (text.encode() if isinstance(text, str) else text)]


class Front:
    """A running front and its stubs."""

    started: ClassVar[list["Front"]] = []

    def __init__(
        self,
        folder: Path,
        engine: Iterable[str] = (),
        flags: Iterable[str] = (),
        *,
        wait: bool = True,
        new_group: bool = False,
    ) -> None:
        self.socket = folder / "run" / "d.sock"
        model = write_model_folder(folder / "model")
        command = [
            sys.executable, str(LAUNCH), *engine, "--", "--model", str(model), "--listen", str(self.socket),
            "--tokenizer-workers", "1", *flags,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=new_group
        )
        self.started.append(self)
        self.lines: queue.Queue[str] = queue.Queue()
        self.log: list[str] = []
        self._readers = [
            threading.Thread(target=self._read_out, daemon=True), threading.Thread(target=self._read_log, daemon=True)
        ]  # fmt: skip
        for reader in self._readers:
            reader.start()
        self.channel = self.new_channel()
        self.generation = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.cache = cache_pb2_grpc.CacheServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)
        self.ready_line = self.lines.get(timeout=30) if wait else ""
        assert not wait or self.ready_line.startswith("downcore ready:"), (self.ready_line, self.log)

    def new_channel(self, *options: tuple[str, Any]) -> grpc.Channel:
        """A connection of its own."""
        own = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1), *options)
        return grpc.insecure_channel(f"unix:{self.socket}", options=own)

    def _read_out(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.rstrip())
        self.lines.put("")

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)

    def generate(self, text: str = "hello", **kwargs: Any) -> list[pb.GenerateResponse]:
        """The whole stream for a prompt that the engine repeats."""
        return list(self.stream(text, **kwargs))

    def stream(self, text: str = "hello", *, timeout: float | None = 20, **kwargs: Any) -> Any:
        if not {"token_ids", "chat"} & set(kwargs):
            kwargs["text"] = text
        return self.generation.Generate(pb.GenerateRequest(**kwargs), timeout=timeout)

    def info(self) -> admin_pb2.GetServerInfoResponse:
        return self.admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=10)

    def health_status(self, service: str = "") -> int:
        return self.health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10).status

    def sequences(self) -> list[admin_pb2.Sequence]:
        return list(self.admin.ListSequences(admin_pb2.ListSequencesRequest(), timeout=10).sequences)

    def close(self) -> int:
        """Ends it in order. Returns: the exit status."""
        self.channel.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.kill(self.process.pid, signal.SIGKILL)
            status = self.process.wait()
        for reader in self._readers:
            reader.join(5)
        return status


@contextmanager
def running_front(folder: Path, engine: Iterable[str] = (), flags: Iterable[str] = ()) -> Generator[Front]:
    """A ready front, which must end with status 0."""
    front = Front(folder, engine, flags)
    try:
        yield front
    finally:
        status = front.close()
    assert status == 0, front.log


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Returns as soon as the condition holds; fails where it does not in time."""
    end_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end_s, "did not come true in time"
        pause.wait(0.01)


def text_of(responses: Iterable[pb.GenerateResponse], index: int = 0) -> str:
    return "".join(r.chunk.text for r in responses if r.HasField("chunk") and r.chunk.index == index)


def ids_sent(responses: Iterable[pb.GenerateResponse], index: int = 0) -> list[int]:
    return [i for r in responses if r.HasField("chunk") and r.chunk.index == index for i in r.chunk.token_ids]


def details_of(error: grpc.RpcError) -> dict[str, Any]:
    """The error's google.rpc details by type name."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None, error
    found: dict[str, Any] = {}
    for detail in status.details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            if detail.Is(kind.DESCRIPTOR):
                message = kind()
                detail.Unpack(message)
                found[kind.DESCRIPTOR.name] = message
    return found
