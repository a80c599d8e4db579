"""downcore prefix, tiers and quota against a real front with the scripted engine."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from downcore.v1 import admin_pb2

from ops.cli.errors import ExitCode
from tests.engines.scripted_cache import GRID
from tests.front.harness import Front, eventually, running_front
from tests.ops.terminal import at_terminal

NUM_PREFIXES = 25
WORD = "hell "  # two tokens


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Generator[Front]:
    engine = (
        "--tiers", "device,host,disk", "--prefixes", str(NUM_PREFIXES), "--records", "30", "--damaged", "2",
        "--context", str(1 << 22),
    )  # fmt: skip
    with running_front(tmp_path_factory.mktemp("cli"), engine) as front:
        yield front


def document(folder: Path, first: str, num_words: int = 1000) -> str:
    """A file whose text begins in its own way, `num_words` words of two tokens long."""
    path = folder / f"{first}.txt"
    path.write_text(first + WORD * num_words)
    return str(path)


def explained(call: Any, path: str) -> dict[str, Any]:
    code, out, _ = call("prefix", "explain", "--prompt-file", path, "-o", "json")
    assert code == ExitCode.OK
    return json.loads(out)


def test_a_prompt_is_warmed_explained_pinned_and_evicted(call: Any, tmp_path: Path) -> None:
    path = document(tmp_path, "life")
    assert explained(call, path)["stop_reason"] == "UNKNOWN"
    code, out, err = call(
        "prefix", "warm", "--prompt-file", path, "--tier", "disk", "--pin", "--ttl", "1h", "--durable"
    )
    assert (code, err) == (ExitCode.OK, "")
    row = out.splitlines()[-1].split()
    assert row[0] == "life.txt"
    assert row[-4:] == ["pinned", "for", "1h", "0m"]
    found = explained(call, path)
    assert found["resume_tokens"] == GRID
    assert found["key"].startswith(row[1])
    short = found["key"][:16]
    assert call("prefix", "evict", short, "--yes")[0] == ExitCode.FAILED
    assert "PREFIX_PINNED" in call("prefix", "evict", short, "--yes")[2]
    assert "until it is evicted" in call("prefix", "unpin", "--prompt-file", path)[1]
    code, out, _ = call("prefix", "evict", short, "--yes")
    assert (code, out) == (ExitCode.OK, "evicted 1 prefix, 16 blocks, 1 checkpoint: 4.0 KiB device, 4.0 KiB disk\n")
    code, _, err = call("prefix", "show", short)
    assert (code, err) == (ExitCode.NOT_FOUND, f"downcore: no prefix {short!r}\n")


def test_several_files_are_warmed_in_one_job_and_chat_is_another_prompt(call: Any, tmp_path: Path) -> None:
    files = [document(tmp_path, name) for name in ("one", "two")]
    options = [part for path in files for part in ("--prompt-file", path)]
    code, out, _ = call("prefix", "warm", *options, "-o", "json")
    assert code == ExitCode.OK
    plain = json.loads(out)["prefixes"]
    assert len({prefix["key"] for prefix in plain}) == 2
    chat = json.loads(call("prefix", "warm", "--chat", "--system", "Be brief.", *options, "-o", "json")[1])["prefixes"]
    assert {prefix["key"] for prefix in chat}.isdisjoint(prefix["key"] for prefix in plain)
    assert [prefix["cached_tokens"] for prefix in chat] == [0, 0]


def test_durable_means_the_disk_where_no_tier_is_named(call: Any, tmp_path: Path) -> None:
    out = call("prefix", "warm", "--prompt-file", document(tmp_path, "dur"), "--durable", "-o", "json")[1]
    (prefix,) = json.loads(out)["prefixes"]
    assert prefix["durable"]
    assert prefix["bytes"]["disk"] == GRID * 4


def test_a_key_names_a_job_whose_receipt_is_there_again(call: Any, tmp_path: Path) -> None:
    command = ("prefix", "warm", "--prompt-file", document(tmp_path, "key"), "--key", "cli-once")
    first, again = call(*command), call(*command)
    assert first[0] == again[0] == ExitCode.OK
    assert first[1] == again[1]
    assert "done before" in again[2]
    code, _, err = call(*command, "--pin")
    assert code == ExitCode.FAILED
    assert "ALREADY_EXISTS: key" in err


def test_ctrl_c_cancels_a_warm_and_leaves_a_detached_one(front: Front, tmp_path: Path) -> None:
    path = document(tmp_path, "ctrl", 300_000)
    for key, flags in (("held", []), ("loose", ["--detach"])):
        command = [sys.executable, "-m", "ops", "prefix", "warm", "--prompt-file", path, "--key", key, *flags]
        environment = os.environ | {"DOWNCORE_SERVER": str(front.socket)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
            eventually(lambda key=key: any(row.request_id == key for row in front.sequences()))
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        assert process.returncode == ExitCode.INTERRUPTED
        assert out == b""
        assert b"Traceback" not in err
        assert (b"goes on" in err) == bool(flags)
    eventually(lambda: {row.request_id for row in front.sequences()} == {"loose"})
    front.admin.AbortSequence(admin_pb2.AbortSequenceRequest(id="loose"), timeout=10)


def test_a_detached_job_can_be_left_at_once_and_joined(call: Any, tmp_path: Path) -> None:
    command = ("prefix", "warm", "--prompt-file", document(tmp_path, "leave"), "--key", "left", "--detach")
    assert call(*command, "--no-wait")[:2] == (ExitCode.OK, "")
    code, out, _ = call(*command, "-o", "json")
    assert code == ExitCode.OK
    assert json.loads(out)["prefixes"][0]["tokens"] == GRID


def test_session_ls_shows_a_warming_job_and_abort_ends_it(call: Any, front: Front, tmp_path: Path) -> None:
    path = document(tmp_path, "shown", 300_000)
    assert call("prefix", "warm", "--prompt-file", path, "--key", "shown", "--detach", "--no-wait")[0] == ExitCode.OK
    eventually(lambda: any(row.request_id == "shown" for row in front.sequences()))
    assert re.search(r"shown/0 +(queued|prefilling), warming", call("session", "ls")[1])
    assert call("session", "abort", "shown", "--yes")[:2] == (ExitCode.OK, "aborted 1\n")
    eventually(lambda: not front.sequences())


def test_lists_are_paged_through_and_say_what_they_leave_out(call: Any) -> None:
    code, out, err = call("prefix", "ls", "--limit", "3", "--order", "hits")
    assert code == ExitCode.OK
    assert len(out.splitlines()) == 2 + 3
    assert re.fullmatch(r"3 of \d+ prefixes; --limit 0 lists all\n", err)
    everything = json.loads(call("prefix", "ls", "--limit", "0", "-o", "json")[1])
    assert len(everything) >= NUM_PREFIXES
    some = json.loads(call("prefix", "ls", "--limit", "7", "-o", "json")[1])
    assert some == everything[:7]
    assert len({row["key"] for row in everything}) == len(everything)
    assert call("prefix", "ls", "0" * 30) == (ExitCode.OK, "", "no prefixes\n")


def test_a_beginning_that_several_keys_share_is_not_guessed_at(call: Any) -> None:
    keys = [row["key"] for row in json.loads(call("prefix", "ls", "--limit", "0", "-o", "json")[1])]
    digit = max("0123456789abcdef", key=lambda digit: sum(key.startswith(digit) for key in keys))
    code, _, err = call("prefix", "pin", digit)
    assert code == ExitCode.USAGE
    assert "give more digits" in err
    code, out, _ = call("prefix", "show", keys[0][:20].upper(), "-o", "json")
    assert (code, json.loads(out)["key"]) == (ExitCode.OK, keys[0])


def test_top_begins_with_the_most_used(call: Any) -> None:
    code, out, _ = call("prefix", "top", "--count", "2", "-w", "0.1", "--limit", "4", "-o", "json")
    assert code == ExitCode.OK
    looks = [json.loads(line) for line in out.splitlines()]
    assert len(looks) == 2
    hits = [prefix["hits"] for prefix in looks[0]["prefixes"]]
    assert len(hits) == 4
    assert hits == sorted(hits, reverse=True)
    assert looks[0]["total"] >= NUM_PREFIXES
    assert re.match(r"\d\d:\d\d:\d\d  \d+ prefixes\nkey ", call("prefix", "top", "--count", "1")[1])


def test_stat_prints_a_line_a_tier_and_rates_for_programs(call: Any) -> None:
    code, out, _ = call("tiers", "stat", "-w", "0.1", "-n", "2")
    assert code == ExitCode.OK
    assert [line.split()[0] for line in out.splitlines()] == ["tier"] + ["device", "host", "disk"] * 2
    code, out, _ = call("tiers", "stat", "-w", "0.1", "-n", "1", "-o", "json")
    look = json.loads(out)
    assert look["interval_s"] == pytest.approx(0.1, abs=0.09)
    assert look["tiers"][2]["state"] == "read-only"
    assert look["tiers"][2]["read_bytes_per_s"] == 0


def test_a_verify_with_damage_fails_and_names_it(call: Any) -> None:
    code, out, err = call("tiers", "verify", "disk")
    assert (code, err) == (ExitCode.FAILED, "")
    assert "segment 3 at 4096" in out
    assert out.splitlines()[-1] == "30 records, 120.0 KiB in 500 ms: 2 damaged, set aside"
    assert json.loads(call("tiers", "verify", "host", "-o", "json")[1])["damaged"] == 2


def test_a_flush_says_what_it_wrote(call: Any) -> None:
    text = "wrote 30 records, 120.0 KiB in 250 ms, synced: it survives a power cut\n"
    assert call("tiers", "flush", "disk")[:2] == (ExitCode.OK, text)
    assert json.loads(call("tiers", "flush", "host", "-o", "json")[1])["durable"] is False


def test_quotas_are_set_listed_and_lifted(call: Any) -> None:
    code, out, _ = call("quota", "set", "team-a", "--cached", "10GiB", "--pinned", "1.5g", "-o", "json")
    assert code == ExitCode.OK
    assert json.loads(out)["pinned_bytes"] == 3 << 29
    assert "team-a" in call("quota", "ls")[1]
    assert call("quota", "rm", "team-a", "--yes")[:2] == (ExitCode.OK, "team-a has no quota any more\n")
    assert call("quota", "rm", "team-a", "--yes")[0] == ExitCode.NOT_FOUND
    assert [row["namespace"] for row in json.loads(call("quota", "ls", "-o", "json")[1])] == ["default"]


@pytest.mark.parametrize(
    "arguments",
    [
        "prefix warm",
        "prefix warm a --prompt-file b",
        "prefix warm a --system b",
        "prefix warm a --no-wait",
        "prefix warm a --ttl soon",
        "prefix warm a --tier tape",
        "prefix warm a --detach",  # the daemon's own complaint
        "prefix warm short",
        "prefix pin",
        "prefix pin abc --prompt-file /nonexistent",
        "prefix pin abc --chat",
        "prefix pin xyz",
        "prefix show",
        "prefix ls --order size",
        "prefix ls xyz",
        "prefix evict " + "a" * 65,
        "tiers verify",
        "tiers flush tape",
        "tiers stat -w 0",
        "quota set a",
        "quota set a --cached much",
        "quota set a//b --cached 1g",
        "quota set a --cached 1 --pinned 2",
    ],
)
def test_a_wrong_command_line_is_a_usage_error(call: Any, arguments: str) -> None:
    code, out, err = call(*arguments.split())
    assert code == ExitCode.USAGE
    assert out == ""
    assert err


def test_an_eviction_asks_at_a_terminal_and_nowhere_else(call: Any, front: Front, tmp_path: Path) -> None:
    path = document(tmp_path, "ask")
    call("prefix", "warm", "--prompt-file", path)
    key = explained(call, path)["key"]
    command = [sys.executable, "-m", "ops", "prefix", "evict", key]
    environment = os.environ | {"DOWNCORE_SERVER": str(front.socket)}
    done = subprocess.run(command, input=b"y\n", capture_output=True, env=environment, check=False, timeout=60)
    assert done.returncode == ExitCode.USAGE
    assert b"--yes" in done.stderr
    code, shown = at_terminal(front.socket, "prefix", "evict", key, typed="n")
    assert code == ExitCode.FAILED
    assert f"Evict prefix {key[:12]} of 1,024 tokens (4.0 KiB device) and all that continue it? [y/N]" in shown
    assert "nothing was done" in shown
    assert explained(call, path)["key"] == key
    code, shown = at_terminal(front.socket, "prefix", "evict", key, typed="y")
    assert (code, shown.splitlines()[-1]) == (ExitCode.OK, "evicted 1 prefix, 16 blocks, 1 checkpoint: 4.0 KiB device")
    assert explained(call, path)["key"] == ""


def test_bars_are_drawn_at_a_terminal(front: Front, tmp_path: Path) -> None:
    path = document(tmp_path, "bar", 100_000)
    code, shown = at_terminal(front.socket, "prefix", "warm", "--prompt-file", path, "--tier", "disk")
    assert code == ExitCode.OK
    assert re.search(r"computing .*[0-9,]+/[0-9,]+ tokens, [01]/1 prompts", shown)
    assert re.search(r"writing .*[0-9,]+/[0-9,]+ tokens", shown)
    assert shown.splitlines()[-1].startswith("bar.txt")
    code, shown = at_terminal(front.socket, "tiers", "verify", "disk")
    assert code == ExitCode.FAILED
    assert re.search(r"verifying disk .*/30 records", shown)


def test_tables_fit_a_terminal_of_120_columns(front: Front) -> None:
    for command in (
        "prefix ls",
        "tiers ls",
        "quota ls",
        "tiers stat -w 0.1 -n 1",
        "tiers show",
        "prefix top --count 1",
    ):
        code, shown = at_terminal(front.socket, *command.split())
        assert code == ExitCode.OK
        assert "…" not in shown
        assert max(map(len, shown.splitlines())) <= 120


@pytest.mark.parametrize("command", ["prefix", "tiers", "quota"])
def test_a_command_starts_in_a_blink(command: str) -> None:
    code = (
        "import resource, sys\n"
        "from ops.cli.main import run\n"
        f"run([{command!r}, '--help'])\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(used.ru_utime + used.ru_stime)\n"
    )
    times_s = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.split()[-1])
        for _ in range(5)
    ]
    assert min(times_s) < 0.3  # processor time: a busy machine does not count
