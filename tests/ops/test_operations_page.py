"""Every command of the page on operations is understood, and run, in the order of the page."""

import re
from pathlib import Path

import pytest
from downcore.v1 import generation_pb2 as pb

from daemon.front.command_line import read
from ops.cli.main import run
from tests.front.harness import running_front, write_model_folder
from tests.ops.commands import check_command, commands_in, settings_in

PAGE = Path(__file__).parents[2] / "ops" / "docs" / "operations.md"
COMMANDS = list(commands_in(PAGE.read_text()))
MAY_END_WITH = {"doctor": {0, 1, 5}}  # it judges this machine
NOT_RUN = {"serve": "a daemon is running for this test already"}


def test_the_page_has_commands_and_each_is_understood() -> None:
    assert len(COMMANDS) >= 20
    for command in COMMANDS:
        check_command([word.replace("/etc/downcore/downcore.toml", "/dev/null") for word in command])


def test_the_page_names_settings_that_exist(tmp_path: Path) -> None:
    text = PAGE.read_text()
    settings_in(dict(pair.split("=") for pair in re.findall(r"DOWNCORE_[A-Z]+__[A-Z_]+=\d+", text)))
    (block,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    path = tmp_path / "downcore.toml"
    path.write_text(block)
    assert read(("--config", str(path)), {}).config().engine.model_path == "/srv/models/model"


def test_every_command_of_the_page_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model_folder(tmp_path / "model")
    (model / "config.json").write_text("{}")
    settings = tmp_path / "downcore.toml"
    settings.write_text(f'[engine]\nmodel_path = "{model}"\n')
    ran = 0
    with running_front(tmp_path / "d") as front:
        monkeypatch.setenv("DOWNCORE_SERVER", str(front.socket))
        stream = front.stream(request_id="ID", stopping=pb.StoppingParams(max_tokens=500_000), timeout=120)
        next(stream)
        for _, *arguments in COMMANDS:
            if arguments[0] in NOT_RUN:
                continue
            if arguments[:2] == ["drain", "--yes"]:
                stream.cancel()
            places = {"/etc/downcore/downcore.toml": str(settings), "/var/lib/downcore": str(tmp_path)}
            code = run([places.get(word, word) for word in arguments])
            shown = capsys.readouterr()
            assert code in MAY_END_WITH.get(arguments[0], {0}), (arguments, shown)
            assert shown.out, arguments
            ran += 1
    assert ran == len(COMMANDS) - len(NOT_RUN)
