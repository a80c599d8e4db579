"""downcore doctor: each check sees what it is for, says what to change, and leaves nothing behind."""

import json
import os
import resource
import stat
from importlib.metadata import requires
from pathlib import Path

import pytest

from daemon.front.sockets import ListenError, claim_socket
from ops.cli.errors import ExitCode
from ops.cli.main import run
from ops.doctor import disk as disk_checks
from ops.doctor import limits, software
from ops.doctor.disk import check_disk
from ops.doctor.finding import Finding, Level
from ops.doctor.machine import Machine, Mount

GIB = 1 << 30


def machine(root: Path, **files: str) -> Machine:
    """A machine whose files are these; `__` in a name is a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("memory_max", "memory.max").replace("cpu_max", "cpu.max")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine(root)


def by_name(findings: "list[Finding]") -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@pytest.mark.parametrize(
    ("installed", "specifiers", "expected"),
    [
        ("2.13.0+cpu", ">=2.11", True), ("2.10.1", ">=2.11", False), ("2.3.5", ">=2,<2.4", True),
        ("2.4.0", ">=2,<2.4", False), ("1.85.1", "==1.85.1", True), ("1.85.2", "==1.85.1", False),
        ("3", "==3.0.0", True), ("0.28.1", ">=0.28,<0.29", True), ("5.0", "!=5.0", False), ("1.0", "", True),
    ],
)  # fmt: skip
def test_versions_are_compared_by_number(installed: str, specifiers: str, expected: bool) -> None:
    assert software.satisfies(installed, specifiers) is expected


def test_packages_that_differ_from_what_is_wanted_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.check_packages().level is Level.OK
    wanted = ["msgspec>=99", "no-such-package-here>=1", "numpy>=1", 'ruff>=99; extra == "dev"']
    monkeypatch.setattr(software, "requires", lambda name: wanted)
    found = software.check_packages()
    assert found.level is Level.FAIL
    assert "msgspec is" in found.found
    assert "no-such-package-here is missing" in found.found
    assert "numpy" not in found.found
    assert "ruff" not in found.found
    assert requires("downcore"), "the project says what it needs"


def fake_driver(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_cards_are_the_drivers_and_torch_must_see_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"version": "2.13.0", "cuda": None, "cards": [], "instructions": "AVX2", "threads": 2}
    monkeypatch.setattr(software, "ask_torch", lambda: told)
    monkeypatch.setattr(software.shutil, "which", lambda name: None)
    assert software.driver_cards() is None
    assert [finding.level for finding in software.check_torch_and_cards()] == [Level.OK, Level.OK]
    monkeypatch.undo()
    monkeypatch.setattr(software, "ask_torch", lambda: told)
    fake_driver(tmp_path, "echo 'H200, 143771 MiB, 140000 MiB, 570.1'", monkeypatch)
    assert software.driver_cards() == ["H200 (140000 MiB of 143771 MiB free, driver 570.1)"]
    _, card = software.check_torch_and_cards()
    assert (card.level, "built for CPUs" in card.found) == (Level.WARN, True)
    told |= {"cuda": "13.0", "cards": ["H200"]}
    assert [finding.level for finding in software.check_torch_and_cards()] == [Level.OK, Level.OK]
    fake_driver(tmp_path, "echo 'no devices were found'; exit 6", monkeypatch)
    _, card = software.check_torch_and_cards()
    assert (card.level, "no devices were found" in card.found) == (Level.WARN, True)


MEMINFO = "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nSwapTotal: 1048576 kB\nSwapFree: {free} kB\n"


def test_memory_is_what_the_cgroup_leaves_of_it(tmp_path: Path) -> None:
    free = machine(tmp_path, proc__meminfo=MEMINFO.format(free=1048576), proc__self__cgroup="0::/a/b\n")
    findings = by_name(list(limits.check_memory(free, 6 * GIB)))
    assert findings["memory"].level is Level.OK
    assert "cgroup" not in findings["memory"].found
    capped = machine(tmp_path, sys__fs__cgroup__a__memory_max="4294967296\n", sys__fs__cgroup__a__b__memory_max="max\n")
    assert capped.cgroup_limit_bytes() == 4 * GIB
    findings = by_name(list(limits.check_memory(capped, 6 * GIB)))
    assert findings["memory"].level is Level.FAIL
    assert "cgroup limit 4.0 GiB; the settings take 6.0 GiB" in findings["memory"].found
    assert "--pool-bytes" in findings["memory"].advice


def test_swap_in_use_and_small_pages_are_told(tmp_path: Path) -> None:
    pages = {"sys__kernel__mm__transparent_hugepage__enabled": "always madvise [never]\n"}
    found = by_name(list(limits.check_memory(machine(tmp_path, proc__meminfo=MEMINFO.format(free=1), **pages), 0)))
    assert (found["swap"].level, found["large pages"].level) == (Level.WARN, Level.WARN)
    pages = {"sys__kernel__mm__transparent_hugepage__enabled": "always [madvise] never\n"}
    found = by_name(
        list(limits.check_memory(machine(tmp_path, proc__meminfo=MEMINFO.format(free=1048576), **pages), 0))
    )
    assert (found["swap"].level, found["large pages"].level) == (Level.OK, Level.OK)


def test_a_quota_of_cores_is_told(tmp_path: Path) -> None:
    assert limits.check_cores(machine(tmp_path, proc__self__cgroup="0::/a\n")).level is Level.OK
    half = machine(tmp_path, sys__fs__cgroup__a__cpu_max="50000 100000\n")
    found = limits.check_cores(half)
    assert (found.level, found.advice.startswith("--threads 1:")) == (Level.WARN, True)


def test_few_files_and_little_locked_memory_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = {resource.RLIMIT_NOFILE: (256, 4096), resource.RLIMIT_MEMLOCK: (64 << 10, 64 << 10)}
    monkeypatch.setattr(limits.resource, "getrlimit", lambda which: allowed[which])
    assert limits.check_files().level is Level.FAIL
    allowed[resource.RLIMIT_NOFILE] = (4096, 4096)
    assert limits.check_files().level is Level.WARN
    allowed[resource.RLIMIT_NOFILE] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert limits.check_files().level is Level.OK
    assert limits.check_locked_memory(1 << 30, has_card=True).level is Level.WARN
    assert limits.check_locked_memory(1 << 30, has_card=False).level is Level.OK


def test_a_slow_clock_and_a_time_that_nobody_keeps_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"sys__devices__system__clocksource__clocksource0__current_clocksource": "hpet\n"}
    for kept, level in ((True, Level.OK), (None, Level.OK), (False, Level.WARN)):
        monkeypatch.setattr(limits, "is_synchronised", lambda kept=kept: kept)
        found = by_name(list(limits.check_clock(machine(tmp_path, **slow))))
        assert (found["clock"].level, found["time of day"].level) == (Level.WARN, level)
    monkeypatch.undo()
    assert limits.is_synchronised() in (True, False, None)


def test_a_socket_folder_that_the_daemon_would_refuse_fails(socket_folder: Path) -> None:
    assert limits.check_socket(str(socket_folder / "d.sock")).level is Level.OK
    assert limits.check_socket(f"unix:{socket_folder}/d.sock").level is Level.OK
    assert limits.check_socket(str(socket_folder / "later" / "d.sock")).level is Level.OK
    for others in (stat.S_IRWXO, stat.S_IXGRP):
        socket_folder.chmod(stat.S_IRWXU | others)
        assert limits.check_socket(f"unix:{socket_folder}/d.sock").level is Level.FAIL
        with pytest.raises(ListenError, match="open to other users"):
            claim_socket(str(socket_folder / "d.sock"))
    assert limits.check_socket("/" + "x" * 120).level is Level.FAIL


MOUNTS = (
    "1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:5 / /dev/shm rw - tmpfs tmpfs rw\n"
    "3 1 0:6 / /with\\040space rw shared:1 - nfs4 host:/x rw\n"
)


def test_the_file_system_is_that_of_the_deepest_mount(tmp_path: Path) -> None:
    found = machine(tmp_path, proc__self__mountinfo=MOUNTS)
    assert found.mount_of(Path("/var/lib")) == Mount("/", "ext4")
    assert found.mount_of(Path("/dev/shm/x")) == Mount("/dev/shm", "tmpfs")
    assert found.mount_of(Path("/with space/x")) == Mount("/with space", "nfs4")


@pytest.mark.parametrize(("kind", "level"), [("ext4", Level.OK), ("tmpfs", Level.WARN), ("nfs4", Level.WARN)])
def test_a_disk_that_is_memory_or_far_away_is_told(tmp_path: Path, kind: str, level: Level) -> None:
    found = machine(tmp_path / "m", proc__self__mountinfo=f"1 0 8:1 / / rw - {kind} /dev/sda rw\n")
    assert by_name(list(check_disk(tmp_path, None, found)))["file system"].level is level


def test_a_disk_is_tried_within_bounds_and_left_as_it_was(tmp_path: Path) -> None:
    found = by_name(list(check_disk(tmp_path / "not" / "yet", 1 << 40, Machine())))
    assert {"direct I/O", "fsync", "disk writes", "disk reads"} <= set(found)
    assert "over 64.0 MiB" in found["disk writes"].found
    assert found["disk space"].level is Level.WARN, "a quota that the disk does not have"
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_checks, "SLOW_BYTES_PER_S", 1 << 60)
    monkeypatch.setattr(disk_checks, "NUM_SYNCS", 1)
    monkeypatch.setattr(disk_checks, "TRIAL_BYTES", disk_checks.PIECE_BYTES)
    monkeypatch.setattr(disk_checks, "SLOW_SYNC_S", 0.0)
    found = by_name(list(check_disk(tmp_path, None, Machine())))
    assert {found[name].level for name in ("fsync", "disk writes", "disk reads")} == {Level.WARN}
    assert "over 4.0 MiB" in found["disk reads"].found


def test_a_directory_that_cannot_be_written_to_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk_checks.os, "access", lambda *_: False)
    (found,) = check_disk(tmp_path, None, Machine())
    assert (found.level, "cannot be written to" in found.found) == (Level.FAIL, True)


def test_the_command_ends_with_the_worst_that_it_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [Finding("one", Level.OK, "well")]
    monkeypatch.setattr("ops.cli.doctor.examine", lambda *_, **__: iter(findings))
    assert run(["doctor"]) == ExitCode.OK
    findings.append(Finding("two", Level.WARN, "not so [well]", "change it"))
    assert run(["doctor"]) == ExitCode.DEGRADED
    assert "-> change it" in capsys.readouterr().out
    findings.append(Finding("three", Level.FAIL, "bad", "mend it"))
    assert run(["doctor", "-o", "json"]) == ExitCode.FAILED
    assert [row["level"] for row in json.loads(capsys.readouterr().out)] == ["ok", "warn", "fail"]


def test_wrong_settings_are_a_finding_and_the_rest_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--quick", "--gird", "5", "-o", "json"]) == ExitCode.FAILED
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["settings"]["found"] == "no flag --gird; did you mean --grid?"
    assert "open files" in rows
