"""Nothing is ever served that was not written by this very model, in this very form, for this very caller.

Engines that differ in one thing share one disk directory. Each finds nothing of the others', and all of its own. It is
repeated with keys cut to 8 bits, where nothing is left to protect but fingerprints and the comparison of token ids.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest

from daemon.cache_messages import Warm
from daemon.config import EngineConfig
from daemon.messages import Submit
from tests.exact.checkpoint import TOKENIZER, change_one_value, write_checkpoint
from tests.exact.families import BLOCK, GRID, POOL_BYTES, config_of, prompt_of
from tests.exact.probe import Probe, Snapshot
from tests.exact.test_exact import assert_same_bytes
from tiers.keys import KEY_BYTES, Provenance, block_key, root_key, state_fingerprint
from tiers.records import RecordKind
from tiers.store import DiskStore

FAMILY = "qwen3_5"  # planes and slots
NAMESPACES = ("tenant-a", "tenant-b")
PROMPTS = [prompt_of(length, length) for length in (2 * GRID + 1, 3 * GRID, 4 * GRID + 5)]
PREFIX_GRID = 2 * GRID  # of the variant with the longer grid


class NamespaceProbe(Probe):
    """A probe whose requests come from `namespace`."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.namespace = ""
        take = self.engine._take

        def take_from_namespace(message: Submit, warm: Warm | None) -> None:
            take(msgspec.structs.replace(message, namespace=self.namespace), warm)

        self.engine._take = take_from_namespace  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class Variant:
    """One engine: its model and settings, what is patched while it lives, and what others' records are to it."""

    model: Path
    settings: Mapping[str, object] = field(default_factory=dict[str, object])
    patch: Callable[[pytest.MonkeyPatch], None] = lambda patch: None

    def grid(self) -> int:
        grid = self.settings.get("grid", GRID)
        assert isinstance(grid, int)
        return grid


def say_in_fingerprint(part: str, value: bytes) -> Callable[[pytest.MonkeyPatch], None]:
    """Another value for one part of the state fingerprint."""

    def fingerprint(parts: dict[str, bytes]) -> bytes:
        assert part in parts or "weights" not in parts, "there is no such part"
        return state_fingerprint({**parts, part: value} if "weights" in parts else parts)

    return lambda patch: patch.setattr("daemon.engine.start.state_fingerprint", fingerprint)


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Variant]:
    folder = tmp_path_factory.mktemp("models")
    base = Variant(write_checkpoint(FAMILY, folder / "base"))
    weights = write_checkpoint(FAMILY, folder / "weights")
    change_one_value(weights)
    tokenizer = write_checkpoint(FAMILY, folder / "tokenizer")
    (tokenizer / TOKENIZER).write_text("{} ")
    rope = {"rope_theta": 20000.0, "rope_type": "default", "partial_rotary_factor": 0.25}
    return {
        "base": base,
        "one value of the weights": Variant(weights),
        "tokenizer": Variant(tokenizer),
        "architecture": Variant(write_checkpoint(FAMILY, folder / "rope", rope_parameters=rope)),
        "dtype": replace(base, settings={"dtype": "bfloat16"}),
        "grid": replace(base, settings={"grid": 2 * GRID}),
        "block size": replace(base, settings={"block_size": 2 * BLOCK}),
        "layout": replace(base, patch=lambda patch: patch.setattr("tiers.layout.ALIGNMENT_BYTES", 512)),
        "format version": replace(base, patch=lambda patch: patch.setattr("daemon.engine.start.FORMAT_VERSION", b"2")),
        "adapter": replace(base, patch=say_in_fingerprint("adapters", b"an adapter")),
        "parallel shape": replace(base, patch=say_in_fingerprint("parallel", b"2")),
        "numerics profile": replace(base, settings={"threads": 2}),
    }


def open_probe(variant: Variant, disk: Path) -> NamespaceProbe:
    settings: dict[str, object] = {
        "dtype": "float32",
        "threads": 1,
        "block_size": BLOCK,
        "grid": GRID,
        "pool_bytes": POOL_BYTES,
        "max_sequences": 4,
        "break_even": False,
        "restore_timeout_s": 60.0,
        **variant.settings,
    }
    return NamespaceProbe(EngineConfig(str(variant.model), disk_path=str(disk), **settings))  # type: ignore[arg-type]


def serve_all(variant: Variant, disk: Path) -> dict[tuple[str, int], Snapshot]:
    """Every prompt of both tenants, each finding an empty device; by tenant and prompt."""
    served: dict[tuple[str, int], Snapshot] = {}
    with pytest.MonkeyPatch.context() as patch:
        variant.patch(patch)
        probe = open_probe(variant, disk)
        for probe.namespace in NAMESPACES:
            for number, prompt in enumerate(PROMPTS):
                served[(probe.namespace, number)] = probe.run(prompt)
            # The device still has all of it when the other tenant comes with the same prompts.
        probe.engine.close()
    return served


@pytest.mark.parametrize("key_bytes", [KEY_BYTES, 1], ids=["whole keys", "keys of 8 bits"])
def test_no_two_engines_that_differ_share_a_record(
    variants: dict[str, Variant], key_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_keys(monkeypatch, key_bytes)
    disk = tmp_path / "tier"
    colds = {name: serve_all(variant, disk) for name, variant in variants.items()}
    for name, served in colds.items():
        assert all(snapshot.cached_len == 0 for snapshot in served.values()), f"{name} was served a foreign prefix"
    hits: Counter[str] = Counter()
    for name, variant in reversed(variants.items()):
        for (namespace, number), snapshot in serve_all(variant, disk).items():
            assert_same_bytes(colds[name][(namespace, number)], snapshot)
            prefix = (len(PROMPTS[number]) - 1) // variant.grid() * variant.grid()
            assert snapshot.from_disk == snapshot.cached_len
            assert snapshot.cached_len == prefix or (key_bytes < KEY_BYTES and snapshot.cached_len < prefix)
            hits[name] += snapshot.cached_len > 0
    if key_bytes == KEY_BYTES:
        assert hits == dict.fromkeys(variants, len(PROMPTS) * len(NAMESPACES))
    else:  # a record whose key another one has as well is replaced by that one: prefixes break off
        assert len(hits) > 1, "the directory is of no use to anybody"


@pytest.mark.parametrize("family", ["llama", FAMILY])
def test_texts_whose_keys_collide_never_get_each_others_blocks(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All texts of four blocks out of three, with a grid of one block: of 120 paths many have equal keys of 8 bits."""
    words = [prompt_of(BLOCK, seed) for seed in range(3)]
    texts = [[*itertools.chain(*chosen), 5] for chosen in itertools.product(words, repeat=4)]
    settings: dict[str, object] = {"grid": BLOCK, "pool_bytes": 4 << 20}
    probe = Probe(config_of(family, tmp_path / "models", "float32", **settings))
    colds: list[Snapshot] = []
    for text in texts:
        probe.forget()
        colds.append(probe.run(text))
    probe.engine.close()
    cut_keys(monkeypatch, 1)
    disk = str(tmp_path / "tier")
    for lower in ({"host_bytes": 16 << 20, "disk_path": disk}, {"disk_path": disk}, {"disk_path": disk}):
        hits = 0
        probe = Probe(config_of(family, tmp_path / "models", "float32", **settings, **lower))
        for _ in range(2):
            for text, cold in zip(texts, colds, strict=True):
                hit = probe.run(text)
                assert_same_bytes(cold, hit)
                hits += hit.cached_len > 0
            probe.forget()
        probe.engine.close()
        assert hits > len(texts) // 4, lower


def cut_keys(monkeypatch: pytest.MonkeyPatch, key_bytes: int) -> None:
    """Block keys of so many bytes, zeros behind them."""
    for module in ("tiers.tree", "tiers.device", "tiers.disk"):
        monkeypatch.setattr(f"{module}.block_key", lambda parent, tokens: cut(block_key(parent, tokens), key_bytes))


def cut(key: bytes, key_bytes: int) -> bytes:
    return key[:key_bytes].ljust(KEY_BYTES, b"\0")
