"""The rules of the layout, read from the sources: who may import whom, and what no file may hold."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODEL_FOLDERS = ROOT / "ops" / "models"  # weights, with the scripts that came with them
PACKAGES = ("kernels", "tiers", "daemon", "ops")

# What each part may import of ours. Longest prefix first decides, for both sides.
MAY_IMPORT = {
    "kernels": {"kernels"},
    "tiers": {"tiers", "tiers.meters", "kernels"},
    "tiers.meters": set(),  # plain counters, which the front counts with as well
    "daemon": {"daemon", "tiers", "kernels", "downcore"},
    "daemon.models": {"daemon.models", "daemon.layers", "daemon.weights", "daemon", "tiers", "kernels"},
    "daemon.layers": {"daemon.layers", "daemon", "tiers", "kernels"},
    "daemon.weights": {"daemon.weights", "daemon.models", "daemon.layers", "daemon", "tiers", "kernels"},
    "daemon.__main__": {"daemon.front", "daemon"},
    "daemon.null": {"daemon.null", "daemon.__main__", "daemon.front", "daemon"},
    "daemon.front": {"daemon.front", "daemon", "tiers.meters", "downcore"},
    "daemon.engine": {
        "daemon.engine",
        "daemon.models",
        "daemon.layers",
        "daemon.weights",
        "daemon",
        "tiers",
        "tiers.meters",
        "kernels",
    },
    "ops": {"ops", "ops.bench", "tiers", "downcore"},  # it reads the disk tier's records; tiers.* without torch
    "ops.bench": {"ops", "ops.bench", "tiers", "kernels", "downcore"},
}
PARTS = sorted({*MAY_IMPORT, "downcore"}, key=len, reverse=True)

# Within tiers only these may import torch or kernels.
TIERS_WITH_TORCH = {"tiers.pools", "tiers.device_transfer", "tiers.staged", "tiers.streamed"}
# Decisions are functions of what they are given: no torch and no clock.
TIMELESS = {"daemon.engine.scheduler", "tiers.tree", "tiers.eviction", "tiers.layout", "tiers.ledger"}
# Run as programs of their own: beside the served model, and on an accelerator.
OPS_WITH_TORCH = (
    *("ops.bench.reference", "ops.bench.kernels", "ops.bench.tune", "ops.bench.model_bench", "ops.bench.model_peer"),
)

FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "dill", "cloudpickle", "shelve", "joblib"}
FORBIDDEN_CALLS = {"torch.load", "torch.save"}
# The command line imports the module of the one command that runs, the loader that of the one family, the choice of
# kernels Triton's where there is a card, the front the gateway's messages or OpenTelemetry where a setting asks for it.
DYNAMIC_IMPORTS = {
    "ops.cli.main", "daemon.models.load", "kernels.dispatch", "daemon.front.gateway", "daemon.front.tracing",
}  # fmt: skip

MOST_LINES = 420
LONG_FILES: dict[str, str] = {}  # file: why it is longer


def _sources(*packages: str) -> list[Path]:
    found = (path for package in packages for path in (ROOT / package).rglob("*.py"))
    return sorted(path for path in found if not path.is_relative_to(MODEL_FOLDERS))


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that the file imports, with the line. `from a import b` is a.b where that is a module of ours."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            base = node.module or ""
            for alias in node.names:
                yield (f"{base}.{alias.name}" if _is_ours(f"{base}.{alias.name}") else base), node.lineno


def _is_ours(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _within(module: str, parent: str) -> bool:
    return module == parent or module.startswith(parent + ".")


def _part(module: str) -> str | None:
    return next((part for part in PARTS if _within(module, part)), None)


def test_sources_are_found() -> None:
    found = {_part(_module(path)) for path in _sources(*PACKAGES)}
    assert {"kernels", "tiers", "daemon", "daemon.engine", "daemon.front", "daemon.layers", "ops"} <= found


def test_imports_run_down_only() -> None:
    wrong: list[str] = []
    for path in _sources(*PACKAGES):
        part = _part(_module(path))
        assert part is not None
        for imported, line in _imports(path):
            target = _part(imported)
            if target is not None and target not in MAY_IMPORT[part]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {part} imports {imported}")
    assert not wrong, "\n".join(wrong)


def test_there_is_no_import_circle() -> None:
    modules = {_module(path): path for path in _sources(*PACKAGES)}
    graph = {
        name: sorted({imported for imported, _ in _imports(path) if imported in modules and imported != name})
        for name, path in modules.items()
    }
    finished: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name not in finished:
            for imported in graph[name]:
                visit(imported, (*trail, name))
            finished.add(name)

    for name in graph:
        visit(name, ())
    assert finished == set(modules)


def _reaches(name: str, wanted: tuple[str, ...]) -> str | None:
    """A chain of imports from `name` to one of the wanted modules, through our own sources."""
    seen: set[str] = set()
    todo: list[tuple[str, str]] = [(name, name)]
    while todo:
        module, trail = todo.pop()
        path = ROOT.joinpath(*module.split("."))
        source = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        for imported, _ in _imports(source):
            if any(_within(imported, target) for target in wanted):
                return f"{trail} -> {imported}"
            if _is_ours(imported) and imported not in seen:
                seen.add(imported)
                todo.append((imported, f"{trail} -> {imported}"))
    return None


@pytest.mark.parametrize("package", ["daemon/front", "ops", "tiers"])
def test_torch_is_reached_only_where_it_may_be(package: str) -> None:
    names = [_module(path) for path in _sources(package)]
    names = [name for name in names if name not in TIERS_WITH_TORCH and not name.startswith(OPS_WITH_TORCH)]
    chains = [_reaches(name, ("torch", "kernels", "transformers")) for name in names]
    assert [chain for chain in chains if chain] == []


def test_decisions_have_neither_torch_nor_a_clock() -> None:
    present = [_module(path) for path in _sources("tiers", "daemon") if _module(path) in TIMELESS]
    assert "tiers.layout" in present
    for name in present:
        assert _reaches(name, ("torch",)) is None
        imported = {module for module, _ in _imports(ROOT.joinpath(*name.split(".")).with_suffix(".py"))}
        assert not imported & {"time", "datetime", "random", "asyncio", "threading"}, name


def test_kernels_package_has_no_version() -> None:
    # transformers takes a module of this name with a version for another package.
    assert "__version__" not in (ROOT / "kernels" / "__init__.py").read_text()


def test_names_that_tritons_do_not_share_stand_in_one_file() -> None:
    old_and_new = ("async_copy_global_to_shared", "async_copy_shared_to_global", "async_load", "async_store")
    for path in (ROOT / "kernels").glob("*.py"):
        if path.name != "gluon_interface.py":
            found = [name for name in (*old_and_new, "thread_barrier", "gl.barrier") if name in path.read_text()]
            assert not found, f"{path.name}: {found}"


def test_nothing_can_unpickle() -> None:
    for path in _sources(*PACKAGES, "tests"):
        for imported, line in _imports(path):
            assert imported.split(".")[0] not in FORBIDDEN_MODULES, f"{path}:{line}: imports {imported}"
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) not in FORBIDDEN_CALLS, f"{path}:{node.lineno}: {ast.unparse(node)}"


def test_no_import_inside_a_function() -> None:
    for path in _sources(*PACKAGES, "tests"):
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                for inner in ast.walk(node):
                    assert not isinstance(inner, ast.Import | ast.ImportFrom), f"{path}:{inner.lineno}"


def test_modules_are_imported_dynamically_in_one_place() -> None:
    found = {
        _module(path)
        for path in _sources(*PACKAGES)
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"__import__", "importlib.import_module"}
    }
    assert found == DYNAMIC_IMPORTS


def test_no_import_hides_behind_type_checking() -> None:
    for path in _sources(*PACKAGES, "tests"):
        for node in ast.walk(_tree(path)):
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            assert name != "TYPE_CHECKING", f"{path}:{getattr(node, 'lineno', 0)}"


def test_a_package_file_is_one_docstring() -> None:
    for path in _sources(*PACKAGES, "proto", "tests"):
        if path.name == "__init__.py":
            body = _tree(path).body
            assert len(body) == 1, f"{path}: holds more than a docstring"
            assert ast.get_docstring(_tree(path)), f"{path}: has no docstring"


def test_files_have_a_size_one_can_read() -> None:
    for path in _sources(*PACKAGES):
        name = str(path.relative_to(ROOT))
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= MOST_LINES or name in LONG_FILES, f"{name} has {lines} lines, at most {MOST_LINES}"


def test_every_module_says_what_it_owns() -> None:
    for path in _sources(*PACKAGES, "tests"):
        assert ast.get_docstring(_tree(path)), f"{path}: has no docstring"


def test_generated_code_equals_a_fresh_protoc_run(tmp_path: Path) -> None:
    protos = sorted((ROOT / "proto").rglob("*.proto"))
    assert protos
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}"),
            *(f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", f"--grpc_python_out={tmp_path}"),
            *(str(path.relative_to(ROOT / "proto")) for path in protos),
        ],
        check=True,
        cwd=ROOT / "proto",
    )
    fresh = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.py*")}
    assert len(fresh) == 3 * len(protos)
    for name, content in fresh.items():
        assert (ROOT / "proto" / name).read_bytes() == content, f"{name} is stale: run make proto"


def test_pins_agree_with_what_is_installed() -> None:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = dict(line.split("==") for line in lines if line)
    for name in ("grpcio", "protobuf", "msgspec", "numpy", "safetensors", "transformers", "typer"):
        assert pins[name] == version(name)
