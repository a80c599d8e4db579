"""Every fenced block of README and ops/docs is one that some test runs, parses, or finds in a file.

`console` blocks are typed by test_walk.py. The others are run by the test that RUN_BY names for their page; what cannot
run on any machine (cron, make) is parsed here. Commands in running text are parsed as well.
"""

import ast
import json
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.main import get_command

from daemon.config import EngineConfig
from daemon.front.config import FrontConfig
from ops.cli.main import COMMANDS, load
from tests.ops.commands import check_command
from tests.pages.blocks import PAGES, ROOT, Block, blocks_of

RUN_BY = {
    "README.md": "tests/pages/test_blocks.py",
    "clients.md": "tests/foreign/test_pages_tools.py",
    "gateway.md": "tests/gateway/test_page.py",
    "observability.md": "tests/foreign/test_scrapers.py",
    "operations.md": "tests/ops/test_operations_page.py",
    "security.md": "tests/ops/test_credentials.py",
    "structured-output.md": "tests/e2e/test_structured.py",
    "warming.md": "tests/pages/test_walk.py",
    "wire.md": "tests/pages/test_walk.py",
}
TYPED = ("README.md", "clients.md", "warming.md", "wire.md")  # by test_walk.py
VALUES = {
    "DIR": ".",
    "PATH": ".",
    "N": "4",
    "R": "1.5",
    "COUNT": "3",
    "TIER": "disk",
    "SHELL": "bash",
    "PORT": "7001",
    "TIME": "1h",
}
BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def blocks(*languages: str) -> Iterator[Block]:
    return (block for block in BLOCKS if block.language in languages)


def test_every_page_names_the_test_that_runs_it() -> None:
    assert {page.name for page in PAGES} == set(RUN_BY)
    for page, test in RUN_BY.items():
        assert page in (ROOT / test).read_text(encoding="utf-8"), f"{test} does not read {page}"


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    known = {"sh", "", "console", "text", "toml", "json", "lark", "python", "js", "go", "crontab"}
    for block in BLOCKS:
        assert block.language in known, block.place
        assert block.language != "console" or block.page.name in TYPED, f"{block.place} is not typed by test_walk.py"


def test_data_parses() -> None:
    for block in blocks("toml"):
        tomllib.loads(block.text)
    for block in blocks("json"):
        json.loads(block.text)
    for block in blocks("python"):
        ast.parse(textwrap.dedent(block.text))


def test_parts_of_programs_stand_in_the_programs() -> None:
    programs = [path.read_text(encoding="utf-8") for path in (ROOT / "ops" / "examples").rglob("*.[pjg][yso]*")]
    parts = [block for block in blocks("python", "js", "go") if block.page.name == "clients.md"]
    assert {block.language for block in parts} == {"python", "js", "go"}
    for block in parts:
        indented = [textwrap.indent(block.text, by) for by in ("", "\t", "    ", "        ")]
        assert any(part in program for part in indented for program in programs), block.place


def test_the_cron_jobs_command_is_understood() -> None:
    (block,) = blocks("crontab")
    *times, command = block.text.strip().split(maxsplit=5)
    assert len(times) == 5
    for field in times:
        assert re.fullmatch(r"\*|\d+", field)
    assert "%" not in command.replace(r"\%", ""), "cron takes a bare percent sign for a line's end"
    check_command(shlex.split(command.replace(r"\%", "%").replace("$(date +%F)", "2026-11-30")))


def test_readmes_make_commands_are_what_ci_runs() -> None:
    (block,) = (block for block in blocks("sh") if block.page.name == "README.md")
    commands = [line.partition("#")[0].strip() for line in block.text.splitlines()]
    assert commands == ["make run", "make test"]
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert set(commands) <= set(lines)


def synopsis() -> list[str]:
    (block,) = (block for block in blocks("text") if block.page.name == "README.md" and "downcore serve" in block.text)
    return [line.partition("   #")[0].partition("  #")[0].strip() for line in block.text.splitlines()]


def alternatives(line: str) -> Iterator[list[str]]:
    """The command lines that one line of the synopsis stands for: `a b | c` is `a b` and, where a has a c, `a c`."""
    first, *others = line.replace("[", "").replace("]", "").removeprefix("downcore ").split(" | ")
    words = shlex.split(first)
    yield words
    group = words[0]
    for other in others:
        words = shlex.split(other)
        if words[0].startswith("-"):
            yield [*shlex.split(first)[:2], *words]
        elif words[0] in children(group):
            yield [group, *words]
        else:
            group = words[0]
            yield words


def children(name: str) -> set[str]:
    command = get_command(load(name).app) if name in COMMANDS and name not in ("serve", "version") else None
    return set(getattr(command, "commands", ()))


def test_every_command_of_readmes_list_exists_and_no_other_does() -> None:
    found: set[str] = set()
    for line in synopsis():
        for words in alternatives(line):
            check_command(["downcore", *(VALUES.get(word, word.replace("PORT", "7001")) for word in words)])
            found.add(
                " ".join(words[:2])
                if words[0] in COMMANDS and words[1:2] and words[1] in children(words[0])
                else words[0]
            )
    for name in COMMANDS:
        below = children(name)
        known = {f"{name} {child}" for child in below} if below else {name}
        assert found & known, f"README does not list {name}"


def check_names(words: list[str]) -> None:
    """Raises where a command, or part of one, names a command or an option that does not exist."""
    if words[0] == "serve":
        check_command(["downcore", *words])
        return
    command: Any = get_command(load(words[0]).app)
    if words[1:] and words[1] in children(words[0]):
        command = command.commands[words[1]]
    options = {name for parameter in command.params for name in parameter.opts} | {"--help"}
    assert {word for word in words if word.startswith("-")} <= options, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_running_text_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for command in re.findall(r"`downcore ([^`]+)`", text):
        check_names(shlex.split(command))
    for target in re.findall(r"`make ([a-z]+)", text):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def test_readmes_flags_exist_and_have_these_defaults() -> None:
    page = PAGES[0].read_text(encoding="utf-8")
    fields = {
        f"--{field.name.replace('_', '-')}": field.default
        for config in (FrontConfig, EngineConfig)
        for field in msgspec.structs.fields(config)
    }
    table = page.partition("| flag | default |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`--.*?`) \| (.*?) \|", table, re.MULTILINE)
    assert len(rows) >= 9
    for flags, default in rows:
        for flag in re.findall(r"`(--[a-z-]+)`", flags):
            assert flag in fields, flag
            if default.isdigit() and fields[flag] is not None:
                assert float(fields[flag]) == float(default), flag


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(#[^)]*)?\)", text):
            path = (page.parent / target).resolve() if target else page
            assert path.exists(), f"{page.name}: {target}"
            if anchor:
                heads = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
                assert anchor[1:] in {re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-") for head in heads}, (
                    anchor
                )


def test_python_stubs_are_made_as_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "ops" / "docs" / "clients.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^python (-m grpc_tools\.protoc .*)$", page, re.MULTILINE)
    (tmp_path / "proto").symlink_to(ROOT / "proto")
    subprocess.run([sys.executable, *shlex.split(command)], cwd=tmp_path, check=True, timeout=60)
    made = {path.name for path in (tmp_path / "downcore" / "v1").iterdir()}
    assert made == {"generation_pb2.py", "generation_pb2.pyi", "generation_pb2_grpc.py"}
