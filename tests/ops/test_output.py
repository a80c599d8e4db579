"""Answers for programs: JSON, a line a row, CSV; what destroys asks first; completion knows every command."""

import csv
import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ops.cli.app import Format
from ops.cli.completion import Words, all_words, bash_script, fish_script, zsh_script
from ops.cli.errors import ExitCode
from ops.cli.main import COMMANDS, run
from ops.cli.output import Lines, print_data
from ops.cli.serve import names_model
from tests.ops.fake_server import FakeDaemon
from tests.ops.terminal import at_terminal

ROWS = [{"name": 'a "b", c', "bytes": {"host": 1, "disk": 2}, "ids": [1, 2]}, {"name": "d\ne", "more": True}]
Capture = pytest.CaptureFixture[str]


def test_csv_has_one_header_and_nested_values_in_columns(capsys: Capture) -> None:
    print_data(ROWS, Format.CSV)
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert rows == [
        {"name": 'a "b", c', "bytes.host": "1", "bytes.disk": "2", "ids": "[1, 2]", "more": ""},
        {"name": "d\ne", "bytes.host": "", "bytes.disk": "", "ids": "", "more": "true"},
    ]


def test_csv_of_a_look_has_what_only_its_second_row_has(capsys: Capture) -> None:
    Lines(Format.CSV).add_look("tiers", [{"name": "device"}, {"name": "disk", "quota_bytes": 5}], time_s=1.5)
    assert capsys.readouterr().out.splitlines() == ["time_s,name,quota_bytes", "1.5,device,", "1.5,disk,5"]


def test_jsonl_is_a_row_a_line_and_json_the_whole_answer(capsys: Capture) -> None:
    answer = {"rows": ROWS, "total": 2}
    print_data(answer, Format.JSONL, rows="rows")
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == ROWS
    print_data(answer, Format.JSON, rows="rows")
    assert json.loads(capsys.readouterr().out) == answer
    print_data({"only": 1}, Format.JSONL)
    assert json.loads(capsys.readouterr().out) == {"only": 1}


def test_a_look_at_several_things_is_a_line_of_json_or_rows_of_csv(capsys: Capture) -> None:
    Lines(Format.JSON).add_look("tiers", [{"name": "x"}, {"name": "y"}], time_s=1.5)
    assert json.loads(capsys.readouterr().out) == {"time_s": 1.5, "tiers": [{"name": "x"}, {"name": "y"}]}
    lines = Lines(Format.CSV)
    for _ in range(2):
        lines.add_look("tiers", [{"name": "x"}, {"name": "y"}], time_s=1.5)
    assert capsys.readouterr().out.splitlines() == ["time_s,name", *["1.5,x", "1.5,y"] * 2]


LISTINGS = ["tiers ls", "session ls", "ledger", "status", "tiers watch -n 2", "ping -c 2 --interval 0"]


@pytest.mark.parametrize("listing", LISTINGS)
def test_every_listing_has_every_form(listing: str, socket_folder: Path, capsys: Capture) -> None:
    with FakeDaemon(socket_folder / "fake.sock") as fake:
        server = ("--server", str(fake.socket))
        for output in Format:
            assert run([*listing.split(), *server, "-o", output]) == ExitCode.OK
            shown = capsys.readouterr().out
            if output is Format.CSV:
                rows = list(csv.reader(io.StringIO(shown)))
                assert len(rows) > 1
                assert {len(row) for row in rows} == {len(rows[0])}
            elif output is Format.JSONL:
                assert [json.loads(line) for line in shown.splitlines()]
            elif output is Format.TABLE:
                assert not shown.startswith(("{", "["))
            else:
                assert shown.startswith(("{", "["))


DESTRUCTIVE = [
    (["session", "abort", "req-1"], "would abort 2 sequences: req-1/0, req-1/1", "AbortSequenceRequest"),
    (["drain"], "would refuse new requests and wait for 1 request", "DrainRequest"),
    (["quota", "rm", "team"], "would lift the quota of team", "RemoveQuotaRequest"),
]


@pytest.mark.parametrize(("command", "would", "forbidden"), DESTRUCTIVE, ids=[" ".join(d[0]) for d in DESTRUCTIVE])
def test_what_destroys_asks_first_and_can_say_what_it_would_do(
    command: list[str], would: str, forbidden: str, socket_folder: Path, capsys: Capture
) -> None:
    with FakeDaemon(socket_folder / "fake.sock") as fake:
        server = ("--server", str(fake.socket))
        assert run([*command, *server, "--dry-run"]) == ExitCode.OK
        assert capsys.readouterr().out.strip() == would
        assert run([*command, *server]) == ExitCode.USAGE, "there is no terminal to ask at"
        assert "--yes" in capsys.readouterr().err
        code, shown = at_terminal(fake.socket, *command, typed="n")
        assert (code, "nothing was done" in shown) == (ExitCode.FAILED, True)
        assert forbidden not in {type(request).__name__ for request in fake.requests}


@pytest.mark.parametrize("command", [["quota", "rm", "free"], ["session", "abort", "nobody"]])
def test_what_is_not_there_would_not_be_taken_away(command: list[str], socket_folder: Path, capsys: Capture) -> None:
    with FakeDaemon(socket_folder / "fake.sock") as fake:
        assert run([*command, "--server", str(fake.socket), "--dry-run"]) == ExitCode.NOT_FOUND
        assert capsys.readouterr().out == ""


def test_a_drain_that_was_agreed_to_at_the_terminal_is_done(socket_folder: Path) -> None:
    with FakeDaemon(socket_folder / "fake.sock") as fake:
        code, shown = at_terminal(fake.socket, "drain", "--wait", "5", typed="y")
        assert (code, "drained" in shown) == (ExitCode.OK, True)


def complete(script: str, *words: str) -> list[str]:
    """What bash offers after these words, the last of which is unfinished."""
    line = " ".join(f"'{word}'" for word in words)
    program = (
        f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _downcore; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.fixture(scope="module")
def tree() -> list[Words]:
    return list(all_words())


def test_bash_completes_commands_options_and_their_choices(tree: list[Words]) -> None:
    script = bash_script(tree)
    assert complete(script, "downcore", "tie") == ["tiers"]
    assert complete(script, "downcore", "tiers", "") == ["ls", "show", "stat", "watch", "verify", "flush", "--help"]
    assert complete(script, "downcore", "tiers", "ls", "-o", "") == ["table", "json", "jsonl", "csv"]
    assert complete(script, "downcore", "prefix", "--server", "x", "warm", "--tier", "d") == ["device", "disk"]
    assert complete(script, "downcore", "serve", "--gri") == ["--grid"]
    assert complete(script, "downcore", "status", "x") == []


def test_completion_knows_every_command(tree: list[Words]) -> None:
    assert set(COMMANDS) <= {words.path for words in tree}
    options = {words.path: words.words for words in tree}
    assert "--rate" in options["bench load"]
    assert "--max-queue" in options["config check"]
    for make in (zsh_script, fish_script):
        assert all(name in make(tree) for name in COMMANDS)


def test_the_command_prints_a_script_that_bash_takes(capsys: Capture) -> None:
    assert run(["completion", "bash"]) == ExitCode.OK
    script = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "downcore.toml"
        path.write_text(text)
        return path

    return write


def test_serve_brings_its_model_only_where_nobody_names_one(written: Callable[[str], Path]) -> None:
    assert not names_model([], {})
    assert names_model(["--model=x"], {})
    assert names_model([], {"DOWNCORE_ENGINE__MODEL_PATH": "x"})
    path = written("[engine]\ngrid = 128\n")
    assert not names_model(["--config", str(path)], {})
    assert not names_model([], {"DOWNCORE_CONFIG": str(path)})
    written("[engine]\nmodel_path = 'x'\n")
    assert names_model([f"--config={path}"], {})
    written("[engine\n")
    assert names_model(["--config", str(path)], {}), "the daemon is to complain, before anything is fetched"
