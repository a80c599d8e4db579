"""The front's settings, frozen and checked when made; daemon/front/command_line.py says where they come from."""

import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from daemon.config import EngineConfig
from daemon.front.principals import is_namespace
from daemon.logs import FORMATS
from daemon.meter_messages import MAX_NAMESPACES

MAX_DRAIN_S = 86_400.0


def default_listen() -> str:
    """The socket in the user's runtime directory, or else in a directory of the user's own under /tmp."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(runtime, "downcore") if os.path.isabs(runtime) else Path(f"/tmp/downcore-{os.getuid()}")
    return str(folder / "downcore.sock")


class FrontConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Listeners, bounds and times of the front.

    Raises:
        ValueError: a value is out of its bounds; the message names the field and the bounds.
    """

    engine: EngineConfig
    listen: Annotated[str, Meta(description="path of the Unix socket; its directory is made, mode 0700")] = ""
    tcp: Annotated[str | None, Meta(description="also listen here, HOST:PORT; port 0 picks one")] = None
    admin_listen: Annotated[str | None, Meta(description="Unix socket of AdminService, then nowhere else")] = None
    admin_tcp: Annotated[str | None, Meta(description="HOST:PORT of AdminService, then nowhere else")] = None
    principals_file: Annotated[str | None, Meta(description="TOML file of who may call")] = None
    tls_cert_file: Annotated[str | None, Meta(description="PEM certificate chain of the TCP listeners")] = None
    tls_key_file: Annotated[str | None, Meta(description="PEM private key of that certificate")] = None
    tls_client_ca_file: Annotated[str | None, Meta(description="PEM authority whose certificate clients need")] = None
    local_needs_token: Annotated[bool, Meta(description="a caller on a Unix socket needs a token as well")] = False
    namespace: Annotated[str, Meta(description="of callers on a Unix socket without a token")] = "default"
    gateway: Annotated[bool, Meta(description="serve vllm.grpc.engine.VllmEngine as well, for gateways")] = False
    max_open_requests: Annotated[int, Meta(description="Generate calls at a time, queued ones included")] = 2048
    max_prompt_bytes: Annotated[int, Meta(description="largest prompt text or chat, in bytes of UTF-8")] = 4 << 20
    max_held_bytes: Annotated[int, Meta(description="of all open requests, as sent and as token ids")] = 512 << 20
    max_tokens_limit: Annotated[int | None, Meta(description="most tokens that an answer may ask for")] = None
    tokenizer_workers: Annotated[int, Meta(description="processes that tokenize and render templates")] = 2
    tokenizer_queue: Annotated[int, Meta(description="prompts that wait for a tokenizer")] = 1024
    tokenizer_timeout_s: Annotated[float, Meta(description="longest time for one prompt; then its worker dies")] = 10.0
    grammar_workers: Annotated[int, Meta(description="processes that check structures, from the first one on")] = 1
    grammar_timeout_s: Annotated[float, Meta(description="longest check of one structure; then its worker dies")] = 3.0
    stall_timeout_s: Annotated[float, Meta(description="how long a client may take no message")] = 30.0
    coalesce: Annotated[bool, Meta(description="tokens that wait for a client go in one message, not in one each")] = (
        True
    )
    one_processor: Annotated[bool, Meta(description="the front keeps to one processor where there are at most 8")] = (
        True
    )
    drain_window_s: Annotated[float, Meta(description="how long streams may go on after SIGTERM")] = 30.0
    pulse_timeout_s: Annotated[float, Meta(description="age of the step clock at which health fails")] = 2.0
    query_timeout_s: Annotated[float, Meta(description="longest wait for a table from the engine")] = 5.0
    restart_backoff_s: Annotated[float, Meta(description="first wait between quick deaths of the engine")] = 0.5
    restart_backoff_max_s: Annotated[float, Meta(description="longest such wait")] = 30.0
    max_failed_starts: Annotated[int, Meta(description="give up when the engine dies this often unready")] = 5
    metrics_listen: Annotated[str | None, Meta(description="Unix socket of /metrics and /healthz over HTTP")] = None
    metrics_tcp: Annotated[str | None, Meta(description="HOST:PORT of the same, loopback only")] = None
    metrics_namespaces: Annotated[int, Meta(description="namespaces that metrics name, the largest ones; 0: none")] = 0
    trace_endpoint: Annotated[str | None, Meta(description="URL that takes OTLP traces over HTTP")] = None
    trace_fraction: Annotated[float, Meta(description="part of the calls without a trace context that is traced")] = 1.0
    request_log: Annotated[float, Meta(description="part of the requests that end well with a line in the log")] = 1.0
    log_format: Annotated[str, Meta(description="text, json, or auto: text on a terminal")] = "auto"
    log_level: Annotated[str, Meta(description="debug, info, warning or error")] = "info"
    engine_command: tuple[str, ...] = (sys.executable, "-m", "daemon.engine")  # hidden; "--fd N" is added to it

    def __post_init__(self) -> None:
        _within("max_open_requests", self.max_open_requests, 1, 1_000_000)
        _within("max_prompt_bytes", self.max_prompt_bytes, 1, 15 << 20)
        _within("max_held_bytes", self.max_held_bytes, 1, 1 << 44)
        if self.max_tokens_limit is not None:
            _within("max_tokens_limit", self.max_tokens_limit, 1, 1 << 30)
        _within("tokenizer_workers", self.tokenizer_workers, 1, 64)
        _within("tokenizer_queue", self.tokenizer_queue, 1, 1_000_000)
        _within("tokenizer_timeout_s", self.tokenizer_timeout_s, 0.01, 600)
        _within("grammar_workers", self.grammar_workers, 1, 64)
        _within("grammar_timeout_s", self.grammar_timeout_s, 0.01, 600)
        _within("stall_timeout_s", self.stall_timeout_s, 0.05, 3600)
        _within("drain_window_s", self.drain_window_s, 0, MAX_DRAIN_S)
        _within("pulse_timeout_s", self.pulse_timeout_s, 0.3, 600)
        _within("query_timeout_s", self.query_timeout_s, 0.01, 600)
        _within("restart_backoff_s", self.restart_backoff_s, 0, 600)
        _within("restart_backoff_max_s", self.restart_backoff_max_s, self.restart_backoff_s, 3600)
        _within("max_failed_starts", self.max_failed_starts, 1, 1000)
        self._check_security()
        _within("metrics_namespaces", self.metrics_namespaces, 0, MAX_NAMESPACES)
        _within("trace_fraction", self.trace_fraction, 0.0, 1.0)
        _within("request_log", self.request_log, 0.0, 1.0)
        if self.trace_endpoint is not None and not self.trace_endpoint.startswith(("http://", "https://")):
            raise ValueError(f"trace_endpoint must be an http or https URL, not {self.trace_endpoint!r}")
        if self.log_format not in FORMATS:
            raise ValueError(f"log_format must be {', '.join(FORMATS)}, not {self.log_format!r}")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ValueError(f"log_level must be debug, info, warning or error, not {self.log_level!r}")
        if not self.engine_command:
            raise ValueError("engine_command is empty")

    def _check_security(self) -> None:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file need each other")
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise ValueError("tls_client_ca_file needs tls_cert_file and tls_key_file")
        if self.tls_client_ca_file is not None and self.principals_file is None:
            raise ValueError("tls_client_ca_file needs principals_file, which says what each client may")
        if self.local_needs_token and self.principals_file is None:
            raise ValueError("local_needs_token needs principals_file, which holds the tokens' hashes")
        if not is_namespace(self.namespace):
            raise ValueError(f"namespace {self.namespace!r} must be names [A-Za-z0-9._-]+ separated by slashes")


def _within(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{field} must be from {low} to {high}, not {value}")
