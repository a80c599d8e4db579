"""The listener's path: ours alone, never a living daemon's, never hindered by a dead one."""

import os
import socket
from pathlib import Path

import pytest

from daemon.front.sockets import ListenError, claim_socket, tcp_target


def test_the_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    claim = claim_socket(str(tmp_path / "a" / "d.sock"))
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    claim.release()


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(ListenError, match="open to other users"):
        claim_socket(str(tmp_path / "open" / "d.sock"))


def test_a_link_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ListenError, match="not a directory"):
        claim_socket(str(tmp_path / "link" / "d.sock"))


def test_a_dead_servers_socket_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    claim = claim_socket(str(path))
    assert not path.exists()
    claim.release()


def test_a_living_servers_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(path))
        living.listen()
        with pytest.raises(ListenError, match="another server answers"):
            claim_socket(str(path))
    assert path.exists()


def test_a_path_is_claimed_once_and_free_after_release(tmp_path: Path) -> None:
    path = str(tmp_path / "d.sock")
    first = claim_socket(path)
    with pytest.raises(ListenError, match="another daemon holds"):
        claim_socket(path)
    first.release()
    claim_socket(path).release()


def test_a_file_in_the_sockets_place_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "d.sock").write_text("precious")
    with pytest.raises(ListenError, match="no socket"):
        claim_socket(str(tmp_path / "d.sock"))
    assert (tmp_path / "d.sock").read_text() == "precious"


def test_a_path_longer_than_the_system_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ListenError, match="longer than"):
        claim_socket(str(tmp_path / ("x" * 120)))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("given", "target"),
    [("127.0.0.1:80", "127.0.0.1:80"), ("localhost:0", "127.0.0.1:0"), ("[::1]:9", "[::1]:9"), ("127.9.9.9:1", None)],
)
def test_loopback_addresses_are_taken(given: str, target: str | None) -> None:
    assert tcp_target(given, is_guarded=False) == (target or given)


@pytest.mark.parametrize(
    "given", ["0.0.0.0:80", "10.0.0.1:80", "[::]:80", "example.com:80", "80", "127.0.0.1:x", ":80", "127.0.0.1:70000"]
)
def test_anything_else_is_refused(given: str) -> None:
    with pytest.raises(ListenError):
        tcp_target(given, is_guarded=False)
