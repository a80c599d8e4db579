"""Whoever adds a family touches daemon/models and nothing else: no other source knows one from another."""

import ast
import re
from pathlib import Path

import daemon.models.base
from daemon.models.load import known_families

ROOT = Path(daemon.models.__path__[0]).parent.parent
SOURCES = ("daemon", "tiers", "kernels", "ops", "proto")

# Where a family's name stands for something else than a case to tell apart.
EXCEPTIONS = {
    "ops/model/metadata.py": "the embedded model comes as a GGUF file of one architecture, and is written as that",
    "ops/model/weights.py": "the same file's tensors",
    "ops/model/convert.py": "the same file",
    "daemon/layers/rope.py": "llama3 is what configurations of any family call one of the ways to stretch positions",
}
# Brand names say where a formula was published; they may stand in a docstring or comment, never in code.
BRANDS = re.compile(r"qwen|llama|glm\d|glm_|deepseek|kimi_linear|nemotron", re.IGNORECASE)


def _sources() -> list[Path]:
    found = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]
    families, shipped = ROOT / "daemon" / "models", ROOT / "ops" / "models" / "tiny-hybrid"
    outside = [path for path in found if families not in path.parents and shipped not in path.parents]
    assert len(outside) > 80
    return outside


def _code(path: Path) -> str:
    """The source without comments and docstrings, so that only what runs is left."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            has_text = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
            if has_text:
                node.body[0] = ast.Pass()
    return ast.unparse(tree)


def _is_protocol(thing: object) -> bool:
    return getattr(thing, "_is_protocol", False)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_families_are_found_by_their_files() -> None:
    assert {"llama", "qwen3", "qwen3_moe", "qwen3_5", "nemotron_h", "glm5_next", "kimi_linear"} <= set(known_families())


def test_no_family_is_named_outside_its_package() -> None:
    # Whole words, in text as well as in code.
    words = re.compile(rf"\b({'|'.join(known_families())})\b")
    named = {_name(path) for path in _sources() if words.search(path.read_text(encoding="utf-8"))}
    assert named - set(EXCEPTIONS) == set()


def test_no_brand_is_in_code_outside_the_package() -> None:
    named = {_name(path) for path in _sources() if BRANDS.search(_code(path))}
    assert named - set(EXCEPTIONS) == set()
    assert named == {name for name in EXCEPTIONS if BRANDS.search(_code(ROOT / name))}


def test_every_exception_is_needed() -> None:
    for name in EXCEPTIONS:
        assert BRANDS.search((ROOT / name).read_text(encoding="utf-8")), f"{name} names no family any more"


def test_the_model_type_of_a_configuration_is_read_in_the_package_alone() -> None:
    # Written by the conversion of the embedded model, and in the gateway's message, which has a field of this name.
    allowed = {"ops/model/metadata.py", "daemon/front/vllm/service.py"}
    assert {_name(path) for path in _sources() if "model_type" in _code(path)} == allowed


def test_nobody_outside_tells_models_apart() -> None:
    wrong: list[str] = []
    for path in _sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        models = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("daemon.models")
            for alias in node.names
            if not _is_protocol(getattr(daemon.models.base, alias.name, None))  # an ability, which any model may have
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"isinstance", "issubclass"}:
                text = ast.unparse(node.args[1])
                is_wrong = any(re.search(rf"\b{re.escape(name)}\b", text) for name in models)
            elif isinstance(node, ast.Compare):
                text = ast.unparse(node)
                is_wrong = any(
                    isinstance(side, ast.Attribute) and side.attr in {"family", "model_type", "__class__"}
                    for side in (node.left, *node.comparators)
                )
            elif isinstance(node, ast.Match):
                text = ast.unparse(node.subject)
                is_wrong = text.endswith((".family", ".model_type"))
            else:
                continue
            if is_wrong:
                wrong.append(f"{_name(path)}:{node.lineno}: {text}")
    assert not wrong, "\n".join(wrong)


def test_the_engine_imports_no_family() -> None:
    allowed = {"daemon.models.base", "daemon.models.load"}
    families = {f"daemon.models.{name}" for name in known_families()}
    for path in _sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("daemon.models"):
                assert node.module not in families, f"{_name(path)}:{node.lineno}"
                assert node.module in allowed or path.parts[-3:-1] == ("daemon", "weights"), _name(path)
