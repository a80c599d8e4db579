"""The front's settings, frozen and checked when made, and the command line that they come from.

Every field of FrontConfig and of EngineConfig is a flag of its own name, so a new setting is one line in its struct.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from daemon.config import EngineConfig

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
    tcp: Annotated[str | None, Meta(description="also listen here, HOST:PORT, loopback only; port 0 picks one")] = None
    max_open_requests: Annotated[int, Meta(description="Generate calls at a time, queued ones included")] = 2048
    max_prompt_bytes: Annotated[int, Meta(description="largest prompt text or chat, in bytes of UTF-8")] = 4 << 20
    max_tokens_limit: Annotated[int | None, Meta(description="most tokens that an answer may ask for")] = None
    tokenizer_workers: Annotated[int, Meta(description="processes that tokenize and render templates")] = 2
    tokenizer_queue: Annotated[int, Meta(description="prompts that wait for a tokenizer")] = 1024
    tokenizer_timeout_s: Annotated[float, Meta(description="longest time for one prompt; then its worker dies")] = 10.0
    stall_timeout_s: Annotated[float, Meta(description="how long a client may take no message")] = 30.0
    drain_window_s: Annotated[float, Meta(description="how long streams may go on after SIGTERM")] = 30.0
    pulse_timeout_s: Annotated[float, Meta(description="age of the step clock at which health fails")] = 2.0
    query_timeout_s: Annotated[float, Meta(description="longest wait for a table from the engine")] = 5.0
    restart_backoff_s: Annotated[float, Meta(description="first wait between quick deaths of the engine")] = 0.5
    restart_backoff_max_s: Annotated[float, Meta(description="longest such wait")] = 30.0
    max_failed_starts: Annotated[int, Meta(description="give up when the engine dies this often unready")] = 5
    log_level: Annotated[str, Meta(description="debug, info, warning or error")] = "info"
    engine_command: tuple[str, ...] = (sys.executable, "-m", "daemon.engine")  # hidden; "--fd N" is added to it

    def __post_init__(self) -> None:
        _within("max_open_requests", self.max_open_requests, 1, 1_000_000)
        _within("max_prompt_bytes", self.max_prompt_bytes, 1, 15 << 20)
        if self.max_tokens_limit is not None:
            _within("max_tokens_limit", self.max_tokens_limit, 1, 1 << 30)
        _within("tokenizer_workers", self.tokenizer_workers, 1, 64)
        _within("tokenizer_queue", self.tokenizer_queue, 1, 1_000_000)
        _within("tokenizer_timeout_s", self.tokenizer_timeout_s, 0.01, 600)
        _within("stall_timeout_s", self.stall_timeout_s, 0.05, 3600)
        _within("drain_window_s", self.drain_window_s, 0, MAX_DRAIN_S)
        _within("pulse_timeout_s", self.pulse_timeout_s, 0.3, 600)
        _within("query_timeout_s", self.query_timeout_s, 0.01, 600)
        _within("restart_backoff_s", self.restart_backoff_s, 0, 600)
        _within("restart_backoff_max_s", self.restart_backoff_max_s, self.restart_backoff_s, 3600)
        _within("max_failed_starts", self.max_failed_starts, 1, 1000)
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ValueError(f"log_level must be debug, info, warning or error, not {self.log_level!r}")
        if not self.engine_command:
            raise ValueError("engine_command is empty")


def parse_args(args: list[str] | None = None) -> FrontConfig:
    """The configuration that a command line says. Exits with status 2 and a usage message where it is wrong."""
    parser = argparse.ArgumentParser(prog="downcored", description="Serves a language model over gRPC.")
    parser.add_argument("--model", required=True, metavar="PATH", help="Hugging Face snapshot folder")
    _add_flags(parser.add_argument_group("front").add_argument, FrontConfig, skip=("engine", "engine_command"))
    _add_flags(parser.add_argument_group("engine").add_argument, EngineConfig, skip=("model_path",))
    given = {name: value for name, value in vars(parser.parse_args(args)).items() if value is not None}
    engine_values = {"model_path": given.pop("model")}
    for name in EngineConfig.__struct_fields__:
        if name in given:
            engine_values[name] = given.pop(name)
    try:
        engine_config = msgspec.convert(engine_values, EngineConfig, strict=False)
        values: dict[str, Any] = {**given, "engine": engine_config}
        values.setdefault("listen", default_listen())
        return msgspec.convert(values, FrontConfig, strict=False)
    except ValueError as error:  # msgspec.ValidationError is one
        parser.error(str(error))


def _add_flags(add: Callable[..., object], struct: type[msgspec.Struct], skip: tuple[str, ...]) -> None:
    described = msgspec.json.schema(struct)["$defs"]
    properties = described[struct.__name__]["properties"]
    for info in msgspec.structs.fields(struct):
        if info.name in skip:
            continue
        default = "" if info.default in ("", None) else f" (default {info.default})"
        text = properties[info.name].get("description", "")
        flag = "--" + info.name.replace("_", "-")
        add(flag, dest=info.name, metavar="VALUE", help=f"{text}{default}".strip() or None)


def _within(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{field} must be from {low} to {high}, not {value}")
