"""The Go client of ops/examples, built as its page says: its protoc command, then `go build`.

`go install` and `go mod tidy` fetch from the Go module proxy, which is not everywhere. Here the plug-ins and packages
come from Debian, as sources that GOPATH finds.
"""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from tests.foreign.kept import debian_packages, do, kept, python_packages

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "ops" / "examples" / "go"
MODULE = "example.org/generate"
# grpc-go and what it is made of, and the two plug-ins of protoc.
SOURCES = (
    "golang-google-grpc-dev", "golang-google-protobuf-dev", "golang-google-genproto-dev",
    "golang-github-golang-protobuf-1-5-dev", "golang-golang-x-net-dev", "golang-golang-x-sys-dev",
    "golang-golang-x-text-dev", "protoc-gen-go", "protoc-gen-go-grpc",
)  # fmt: skip


def page_commands() -> list[str]:
    """The commands with which the page on clients builds and runs this one."""
    page = (ROOT / "ops" / "docs" / "clients.md").read_text(encoding="utf-8")
    (block,) = (found for found in re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S) if "protoc-gen-go" in found)
    lines = block.replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+", " ", line) for line in lines if line and not line.startswith("#")]


def go_program() -> Path:
    """The program, made by the page's own protoc command and `go build`."""
    toolchain, sources = python_packages("requirements-go.txt"), debian_packages("golang", SOURCES)
    generate = next(line for line in page_commands() if line.startswith("protoc "))
    proto = (ROOT / "proto" / "downcore" / "v1" / "generation.proto").read_bytes()
    recipe = b"\0".join(
        (str((toolchain, sources)).encode(), generate.encode(), proto, (SOURCE / "main.go").read_bytes())
    )

    def fill(folder: Path) -> None:
        package = folder / "src" / MODULE
        shutil.copytree(SOURCE, package)
        plugins = f"{sources / 'usr' / 'bin'}:{os.environ['PATH']}"
        words = [word.replace("../../../proto", str(ROOT / "proto")) for word in shlex.split(generate)]
        do([sys.executable, "-m", "grpc_tools.protoc", *words[1:]], package, "protoc", PATH=plugins)
        # Without optimization it builds in two thirds of the time.
        build = [
            str(toolchain / "go" / "bin" / "go"),
            "build",
            "-gcflags=all=-N -l",
            "-o",
            str(folder / "generate"),
            ".",
        ]
        do(
            build, package, "go build", GO111MODULE="off", GOPATH=f"{folder}:{sources / 'usr' / 'share' / 'gocode'}",
            GOCACHE=str(folder.parent / "go-build"), GOFLAGS="", GOTOOLCHAIN="local", CGO_ENABLED="0",
        )  # fmt: skip

    return kept("go-client", recipe, fill) / "generate"


def gofmt(*arguments: str) -> str:
    """What gofmt prints."""
    program = python_packages("requirements-go.txt") / "go" / "bin" / "gofmt"
    return do([str(program), *arguments], SOURCE, "gofmt")
