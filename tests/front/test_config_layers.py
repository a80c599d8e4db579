"""Settings in layers: who wins, where a value came from, and that no misspelt one is a default in silence."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from daemon.config import EngineConfig
from daemon.front.command_line import SECTIONS, Action, Command, read
from daemon.front.config import FrontConfig
from daemon.front.settings import SettingsError

FILE = """\
# a comment
[front]
stall_timeout_s = 7
"tcp" = "127.0.0.1:0"

[engine]
model_path = "from-file"
grid = 128
break_even = false
"""


def command(*flags: str, environ: Mapping[str, str] | None = None) -> Command:
    return read(flags, environ or {})


def written(folder: Path, text: str = FILE) -> Path:
    path = folder / "downcore.toml"
    path.write_text(text)
    return path


def origins(parsed: Command) -> dict[str, tuple[Any, str]]:
    return {row["key"]: (row["value"], row["origin"]) for row in parsed.rows()}


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(tmp_path: Path) -> None:
    path = written(tmp_path)
    environ = {"DOWNCORE_CONFIG": str(path), "DOWNCORE_ENGINE__GRID": "256", "DOWNCORE_FRONT__STALL_TIMEOUT_S": "8"}
    parsed = command("--grid", "512", "--block-size", "32", environ=environ)
    found = origins(parsed)
    assert found["grid"] == (512, "--grid")
    assert found["stall_timeout_s"] == (8.0, "DOWNCORE_FRONT__STALL_TIMEOUT_S")
    assert found["tcp"] == ("127.0.0.1:0", f"{path}:4")
    assert found["model_path"] == ("from-file", f"{path}:7")
    assert found["max_queue"] == (1024, "default")
    config = parsed.config()
    engine = EngineConfig(model_path="from-file", grid=512, block_size=32, break_even=False)
    assert config == FrontConfig(engine=engine, listen=config.listen, tcp="127.0.0.1:0", stall_timeout_s=8.0)
    assert found["listen"] == (config.listen, "default")


def test_a_file_named_by_flag_wins_over_the_one_named_by_the_variable(tmp_path: Path) -> None:
    environ = {"DOWNCORE_CONFIG": str(tmp_path / "absent.toml")}
    assert command("--config", str(written(tmp_path)), environ=environ).config().engine.grid == 128
    with pytest.raises(SettingsError, match=r"absent\.toml: No such file"):
        command(environ=environ)


def test_every_setting_can_be_given_in_each_layer_by_its_own_name(tmp_path: Path) -> None:
    for section, known in SECTIONS.items():
        for name, info in known.fields.items():
            variable = f"DOWNCORE_{section.upper()}__{name.upper()}"
            text = "x" if info.default in (None, "") or name == "model_path" else str(info.default)
            given = command(environ={variable: text}).given
            assert given[section][name].origin == variable
            path = written(tmp_path, f"[{section}]\n{name} = 1\n")
            assert command("--config", str(path)).given[section][name].origin == f"{path}:2"
    assert set(SECTIONS["front"].fields) == set(FrontConfig.__struct_fields__) - {"engine", "engine_command"}
    assert set(SECTIONS["engine"].fields) == set(EngineConfig.__struct_fields__)
    assert not set(SECTIONS["front"].fields) & set(SECTIONS["engine"].fields), "one flag would set two"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[engine]\ngird = 128\n", r"no setting \[engine\] gird; did you mean grid\? \(.*toml:2\)"),
        ("[engin]\ngrid = 128\n", r"no table 'engin'; did you mean engine\? \(.*toml:1\)"),
        ("[engine]\ntcp = 'x'\n", r"no setting \[engine\] tcp; it belongs to \[front\] \(.*toml:2\)"),
        ("grid = 128\n", r"'grid' stands outside of \[front\] and \[engine\] \(.*toml:1\)"),
        ("[front]\nengine_command = ['x']\n", r"no setting \[front\] engine_command"),
        ("[engine\n", r"toml: Expected"),
        ("[engine]\ngrid = 128\n\n[engine]\n", r"toml: .*line 4"),
    ],
)
def test_what_the_file_says_wrongly_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        command("--config", str(written(tmp_path, text)))


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("DOWNCORE_ENGINE__GIRD", "DOWNCORE_ENGINE__GRID"),
        ("DOWNCORE_ENGINE_GRID", "DOWNCORE_ENGINE__GRID"),
        ("DOWNCORE_ENGIN__GRID", "DOWNCORE_ENGINE__GRID"),
        ("DOWNCORE_FRONT__ENGINE_COMMAND", ""),
    ],
)
def test_a_variable_that_only_looks_like_a_setting_is_an_error(variable: str, hint: str) -> None:
    with pytest.raises(SettingsError, match=f"no setting {variable}.*{hint}"):
        command(environ={variable: "128"})


def test_other_variables_are_left_alone() -> None:
    environ = {"DOWNCORE_SERVER": "x", "DOWNCORE_REQUIRE_MODEL": "1", "DOWNCORE_CONFIG": "", "PATH": "/bin"}
    assert command(environ=environ).given == {"front": {}, "engine": {}}


@pytest.mark.parametrize(("flag", "hint"), [("--gird", "--grid"), ("--max-que=5", "--max-queue"), ("--xyzzy", "")])
def test_an_unknown_flag_is_an_error_with_a_suggestion(flag: str, hint: str) -> None:
    with pytest.raises(SettingsError, match=f"no flag {flag.split('=')[0]}; .*{hint}"):
        command(flag)


def test_a_wrong_value_is_told_with_where_it_was_set(tmp_path: Path) -> None:
    path = written(tmp_path, "[engine]\nmodel_path = 'm'\ngrid = 'many'\n")
    with pytest.raises(SettingsError, match=rf"grid 'many': .*\({re.escape(str(path))}:3\)"):
        command("--config", str(path)).config()
    bounds = command("--model", "m", "--block-size", "64", environ={"DOWNCORE_ENGINE__GRID": "100"})
    with pytest.raises(SettingsError, match=r"grid 100 is not a multiple .*grid: DOWNCORE_ENGINE__GRID"):
        bounds.config()
    with pytest.raises(SettingsError, match="no model is named"):
        command().config()


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("67108864", 64 << 20), ("64MiB", 64 << 20), ("64mb", 64 << 20), ("1.5g", 3 << 29), ("2 GiB", 2 << 30)],
)
def test_what_is_counted_in_bytes_may_have_a_unit_in_every_layer(tmp_path: Path, text: str, num_bytes: int) -> None:
    path = written(tmp_path, "[engine]\ndirty_bytes = " + (text if text.isdigit() else f"'{text}'"))
    environ = {"DOWNCORE_ENGINE__DIRTY_BYTES": text}
    for layer in (command("--dirty-bytes", text), command(environ=environ), command("--config", str(path))):
        assert origins(layer)["dirty_bytes"][0] == num_bytes
    assert origins(command("--write-bytes-per-s", "8MiB"))["write_bytes_per_s"][0] == 8 << 20


@pytest.mark.parametrize(
    ("flag", "text", "wanted"),
    [
        ("--dirty-bytes", "64 GiBs", "a size: 4096, 512MiB, 1.5g"),
        ("--host-bytes", "much", "a size: 4096, 512MiB, 1.5g"),
        ("--max-queue", "1k", "a whole number"),
        ("--grid", "1k", "a whole number"),
        ("--slice-ms", "15ms", "a number"),
        ("--gateway", "yes", "true or false"),
    ],
)
def test_a_value_of_another_kind_is_told_what_is_wanted_in_an_operators_words(
    flag: str, text: str, wanted: str
) -> None:
    with pytest.raises(SettingsError, match=re.escape(f"{text!r}: must be {wanted} ({flag})")):
        command(flag, text).rows()


def test_settings_are_shown_only_where_a_daemon_would_start_with_them() -> None:
    for flags in (("--grid", "100"), ("--disk-bytes", "1g"), ("--log-level", "loud")):
        with pytest.raises(SettingsError, match=flags[0][2:].replace("-", "_")):
            command(*flags).rows()


def test_a_model_named_without_its_flag_is_told_the_flag() -> None:
    with pytest.raises(SettingsError, match=r"'/srv/model' is no flag; .* --model"):
        command("/srv/model")


def test_a_flag_of_true_or_false_alone_is_true() -> None:
    assert origins(command("--gateway", "--grid", "128"))["gateway"] == (True, "--gateway")
    for text, value in (("false", False), ("true", True), ("0", False)):
        assert origins(command("--replay", text))["replay"] == (value, "--replay")


def test_no_setting_holds_a_secret_itself() -> None:
    for known in SECTIONS.values():
        for name, info in known.fields.items():
            assert isinstance(info.default, bool) or not re.search(
                r"(^|_)(secret|password|passphrase|key|token|credentials)$", name
            ), f"{name}: a secret lies in a file, and the setting is its path, {name}_file"


def test_every_setting_says_what_it_is_for() -> None:
    assert [name for known in SECTIONS.values() for name, text in known.help.items() if not text] == []


def daemon(*flags: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    """`python -m daemon`, which ends before it serves anything."""
    command_line = [sys.executable, "-m", "daemon", *flags]
    return subprocess.run(
        command_line, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environ}
    )


def test_the_daemon_shows_and_checks_its_settings_without_serving(tmp_path: Path) -> None:
    path = written(tmp_path)
    shown = daemon("--show-config", DOWNCORE_CONFIG=str(path))
    assert shown.returncode == 0
    (row,) = (row for row in json.loads(shown.stdout) if row["key"] == "grid")
    assert (row["section"], row["flag"], row["value"], row["origin"]) == ("engine", "--grid", 128, f"{path}:8")
    model = tmp_path / "model"
    missing = daemon("--check-config", "--config", str(path), "--model", str(model))
    assert (missing.returncode, "no folder with a config.json (--model)" in missing.stderr) == (2, True)
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert daemon("--check-config", "--config", str(path), "--model", str(model)).returncode == 0
    wrong = daemon("--check-config", "--config", str(path), "--grid", "100")
    assert (wrong.returncode, "grid 100 is not a multiple" in wrong.stderr) == (2, True)
    assert read(("--check-config",), {}).action is Action.CHECK


def test_a_model_folder_that_is_not_there_is_said_before_anything_starts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "daemon", "--model", str(tmp_path / "none"), "--listen", str(tmp_path / "d" / "s")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"downcored: there is no model folder {str(tmp_path / 'none')!r}\n"
