"""The command line: every setting is a flag, and a wrong value is an error that names it."""

import msgspec
import pytest

from daemon.config import EngineConfig, EvictionPolicy, LoadFormat
from daemon.front.command_line import parse_args
from daemon.front.config import FrontConfig, default_listen


def test_every_field_of_both_configurations_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    names = {*FrontConfig.__struct_fields__, *EngineConfig.__struct_fields__}
    hidden = {"engine", "engine_command", "model_path"}
    assert [name for name in names - hidden if "--" + name.replace("_", "-") not in shown] == []


def test_flags_reach_their_fields_with_their_types() -> None:
    config = parse_args(
        ["--model", "m", "--listen", "s", "--load-format", "dummy", "--grid", "128", "--slice-ms", "3.5",
         "--max-open-requests", "9", "--pool-bytes", "4096", "--tcp", "127.0.0.1:0"]
    )  # fmt: skip
    engine = EngineConfig(model_path="m", load_format=LoadFormat.DUMMY, grid=128, slice_ms=3.5, pool_bytes=4096)
    assert config == FrontConfig(engine=engine, listen="s", max_open_requests=9, tcp="127.0.0.1:0")
    config = parse_args(
        ["--model", "m", "--listen", "s", "--policy", "lru", "--host-bytes", "0", "--disk-path", "d",
         "--disk-bytes", str(1 << 30), "--write-bytes-per-s", str(1 << 20), "--dirty-bytes", str(1 << 20)]
    )  # fmt: skip
    engine = EngineConfig(
        model_path="m", policy=EvictionPolicy.LRU, host_bytes=0, disk_path="d", disk_bytes=1 << 30,
        write_bytes_per_s=1 << 20, dirty_bytes=1 << 20,
    )  # fmt: skip
    assert config == FrontConfig(engine=engine, listen="s")


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--grid", "100"], "grid"),
        (["--max-open-requests", "0"], "max_open_requests"),
        (["--drain-window-s", "nan"], "drain_window_s"),
        (["--stall-timeout-s", "-1"], "stall_timeout_s"),
        (["--log-level", "loud"], "log_level"),
        (["--load-format", "pickle"], "load_format"),
        (["--threads", "many"], "threads"),
        (["--policy", "fifo"], "policy"),
        (["--host-bytes", "-1"], "host_bytes"),
        (["--disk-path", ""], "disk_path"),
        (["--disk-bytes", str(1 << 30)], "disk_path"),
        (["--disk-path", "d", "--disk-bytes", "4096"], "disk_bytes"),
        (["--write-bytes-per-s", "0"], "write_bytes_per_s"),
        (["--dirty-bytes", "0"], "dirty_bytes"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_field(
    flags: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--model", "m", *flags])
    assert caught.value.code == 2
    assert name in capsys.readouterr().err


def test_the_default_socket_lies_in_the_users_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_listen() == "/run/user/7/downcore/downcore.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_listen().startswith("/tmp/downcore-")


def test_a_configuration_travels_as_it_is() -> None:
    config = EngineConfig(model_path="m", grid=64)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
