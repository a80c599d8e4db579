"""Nothing is ever served that was not written by this very model, in this very form, for this very caller.

Engines that differ in one thing share one disk directory. Each finds nothing of the others', and all of its own. It is
repeated with keys cut to 8 bits, where nothing is left to protect but fingerprints and the comparison of token ids.
"""

import itertools
import random
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest

from daemon.cache_messages import Lookup, LookupAnswer, Warm
from daemon.config import EngineConfig
from daemon.messages import Submit, ToFront
from tests.campaigns.budget import first_seed
from tests.exact.checkpoint import TOKENIZER, change_one_value, write_checkpoint
from tests.exact.families import BLOCK, GRID, POOL_BYTES, config_of, prompt_of
from tests.exact.probe import Probe, Snapshot
from tests.exact.test_exact import assert_same_bytes
from tiers.keys import KEY_BYTES, Provenance, block_key, root_key, state_fingerprint, token_bytes
from tiers.records import Identity, RecordHead, RecordKind
from tiers.store import DiskStore

FAMILY = "qwen3_5"  # planes and slots
NAMESPACES = ("tenant-a", "tenant-b")
PROMPTS = [prompt_of(length, length) for length in (2 * GRID + 1, 3 * GRID, 4 * GRID + 5)]
NUM_TEXTS = 40  # of the 81


class NamespaceProbe(Probe):
    """A probe whose requests come from `namespace`."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.namespace = ""
        self.lookups: list[LookupAnswer] = []
        take = self.engine._take

        def take_from_namespace(message: Submit, warm: Warm | None) -> None:
            take(msgspec.structs.replace(message, namespace=self.namespace), warm)

        self.engine._take = take_from_namespace  # type: ignore[method-assign]

    def _receive(self, message: ToFront) -> None:
        if isinstance(message, LookupAnswer):
            self.lookups.append(message)
        super()._receive(message)


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
    texts = random.Random(first_seed()).sample(texts, NUM_TEXTS)
    settings: dict[str, object] = {"grid": BLOCK, "pool_bytes": 4 << 20}
    probe = Probe(config_of(family, tmp_path / "models", "float32", **settings))
    colds: list[Snapshot] = []
    for text in texts:
        probe.forget()
        colds.append(probe.run(text))
    probe.engine.close()
    cut_keys(monkeypatch, 1)
    disk = str(tmp_path / "tier")
    hits = 0
    # The first engine leaves half of the texts. The next two come to know the others, beside records of equal keys.
    for num_texts, host_bytes in ((len(texts) // 2, 16 << 20), (len(texts), 0), (len(texts), 0)):
        more = {**settings, "host_bytes": host_bytes, "disk_path": disk}
        probe = Probe(config_of(family, tmp_path / "models", "float32", **more))
        for text, cold in zip(texts[:num_texts], colds, strict=False):
            hit = probe.run(text)
            assert_same_bytes(cold, hit)
            hits += hit.from_disk > 0
            probe.forget()
        probe.engine.close()
    assert hits > len(texts) // 4, "the directory is of no use"


@pytest.mark.parametrize("family", ["llama", FAMILY])
def test_what_hangs_below_a_record_of_the_same_key_is_not_taken_for_its_own(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks with equal keys of 8 bits under different parents: what follows the one must not follow the other."""
    cut_keys(monkeypatch, 1)

    def open_tiny(**more: object) -> Probe:
        return Probe(config_of(family, tmp_path / "models", "float32", grid=BLOCK, **more))

    probe = open_tiny()
    one, other, last = find_collision(root_key(probe.engine.device.fingerprint, Provenance.EXACT, ""))
    cold = probe.run([*other, *last, 5])
    probe.engine.close()
    probe = open_tiny(disk_path=str(tmp_path / "tier"))
    probe.run([*one, *last, 5])
    probe.run([*other, 5])
    probe.engine.close()
    probe = open_tiny(disk_path=str(tmp_path / "tier"))
    assert_same_bytes(cold, probe.run([*other, *last, 5]))
    probe.engine.close()


def find_collision(root: bytes) -> tuple[list[int], list[int], list[int]]:
    """Two texts of two blocks that differ in both and end in equal keys, and a block to follow them."""
    words = [prompt_of(BLOCK, seed) for seed in range(40)]

    def key_of(*text: list[int]) -> bytes:
        key = root
        for word in text:
            key = cut(block_key(key, token_bytes(word)), 1)
        return key

    for a, b, c, d in itertools.product(words, repeat=4):
        if a != c and b != d and key_of(a) != key_of(c) and key_of(a, b) == key_of(c, d):
            last = next(word for word in words if len({key_of(a), key_of(c), key_of(a, b), key_of(a, b, word)}) == 4)
            return [*a, *b], [*c, *d], last
    raise AssertionError("no two keys of 8 bits are equal")


@pytest.mark.parametrize("what", ["fingerprint", "numerics profile", "provenance"])
def test_records_that_may_not_be_used_are_misses_and_counted_by_reason(
    what: str, variants: dict[str, Variant], tmp_path: Path
) -> None:
    disk = tmp_path / "tier"
    written = serve_all(variants["base"], disk)
    variant = variants["base"]
    if what == "provenance":
        make_fast(variant, disk)
    else:
        variant = variants[what if what in variants else "one value of the weights"]
    served = serve_all(variant, disk)
    assert all(snapshot.cached_len == 0 for snapshot in served.values())
    assert what != "provenance" or [s.logits for s in served.values()] == [s.logits for s in written.values()]
    probe = open_probe(variant, disk)
    tier = probe.engine.cache.disk
    assert tier is not None
    assert isinstance(tier.store, DiskStore)
    counts = {other.reason: other.num_records for other in tier.store.unreadable()}
    probe.engine.close()
    assert list(counts) == [what], "what cannot be used here is not told by its reason"
    assert counts[what] > len(PROMPTS)


def test_a_look_up_says_that_another_numerics_profile_has_the_prefix(
    variants: dict[str, Variant], tmp_path: Path
) -> None:
    serve_all(variants["base"], tmp_path / "tier")
    probe = open_probe(variants["numerics profile"], tmp_path / "tier")
    probe.engine.handle(Lookup(1, NAMESPACES[0], array("i", PROMPTS[0]).tobytes()))
    probe.engine.close()
    (answer,) = probe.lookups
    assert answer.resume_tokens == 0
    assert "numerics profile" in answer.stop


def make_fast(variant: Variant, disk: Path) -> None:
    """The same records once more, as an engine that reuses fast would have written them; the exact ones are gone."""
    probe = open_probe(variant, disk)
    fingerprint, profile = probe.engine.device.fingerprint, bytes.fromhex(probe.info.numerics_profile)
    identity = Identity(fingerprint, profile, probe.engine.device.layout)
    probe.engine.close()
    store = DiskStore.open(disk, identity, quota_bytes=1 << 30)
    entries = list(store.entries())
    images = [memoryview(bytearray(identity.image_bytes(entry.head.kind))) for entry in entries]
    requests = [(entry.head, entry.ref, image) for entry, image in zip(entries, images, strict=True)]
    assert store.read(requests) == [None] * len(entries)
    keys: dict[bytes, bytes] = {}  # an exact key's fast counterpart
    records: list[tuple[RecordHead, memoryview]] = []
    for entry, image in zip(entries, images, strict=True):
        head = entry.head
        if head.depth == 1:
            keys[head.parent] = root_key(fingerprint, Provenance.FAST, head.namespace)
        if head.kind is RecordKind.BLOCK:
            keys[head.key] = block_key(keys[head.parent], head.tokens)
        fast = replace(head, provenance=Provenance.FAST, parent=keys[head.parent], key=keys[head.key])
        records.append((fast, image))
    store.write(records)
    store.delete([entry.ref for entry in entries])
    assert {entry.head.provenance for entry in store.entries()} == {Provenance.FAST}
    store.close()


def cut_keys(monkeypatch: pytest.MonkeyPatch, key_bytes: int) -> None:
    """Block keys of so many bytes, zeros behind them."""
    for module in ("tiers.tree", "tiers.device", "tiers.disk"):
        monkeypatch.setattr(f"{module}.block_key", lambda parent, tokens: cut(block_key(parent, tokens), key_bytes))


def cut(key: bytes, key_bytes: int) -> bytes:
    return key[:key_bytes].ljust(KEY_BYTES, b"\0")
