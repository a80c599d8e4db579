"""Exactness on an accelerator: of the cache over all tiers, and of replayed decode steps."""

import hashlib
import json
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
import torch

from daemon.batch import SequenceRows, make_batch
from daemon.config import EngineConfig
from daemon.engine.captured import LAST, DecodeRow, Draw
from daemon.engine.decode_step import DecodeStep, Launched
from daemon.engine.flight import Flights
from daemon.messages import Abort, SamplingParams, Submit
from daemon.models.base import finish
from daemon.models.load import load_model
from ops.models.shipped import TINY_HYBRID
from tests.exact.longctx import LongProbe
from tests.exact.probe import Probe
from tests.exact.test_exact import GRID, Step, assert_same_bytes, random_ids, run_process
from tiers.pools import DevicePools

LENGTHS = (1024, 1025, 2049, 3000)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator here")


def test_every_tier_gives_the_bytes_of_a_cold_run_on_the_accelerator(tmp_path: Path) -> None:
    text = random_ids(3100, 41, 8_000)
    prompts = [text[:length] for length in LENGTHS]
    others: list[Step] = [{"prompt": random_ids(700, 42, 8_000)}, {"prompt": random_ids(1500, 43, 8_000)}]
    each: list[Step] = [step for prompt in prompts for step in ({"forget": True}, {"prompt": prompt, "max_tokens": 2})]
    # This model computes a chunk sooner than any tier could load it; here bytes are in question, not what pays.
    config = {"device": "cuda", "grid": GRID, "break_even": False}
    colds = run_process(TINY_HYBRID, each, **config)
    disk = {"disk_path": str(tmp_path / "tier")}
    paths = {
        "device": (run_process(TINY_HYBRID, [*others, *(s for s in each * 2 if "prompt" in s)], **config), "device"),
        "host": (run_process(TINY_HYBRID, [*others, *each * 2], host_bytes=1 << 28, **config), "host"),
        "disk": (run_process(TINY_HYBRID, [*others, *each * 2], **disk, **config), "disk"),
        "restart": (run_process(TINY_HYBRID, [*others, *each], **disk, **config), "disk"),
    }
    for path, (again, tier) in paths.items():
        for cold, hit in zip(colds, again[-len(prompts) :], strict=True):
            assert cold.cached_len == 0
            assert hit.cached_len == (cold.prompt_len - 1) // GRID * GRID, path
            assert tier == "device" or hit.cached_len == (hit.from_host if tier == "host" else hit.from_disk), path
            assert_same_bytes(cold, hit)


def test_replayed_steps_have_the_bytes_of_eager_ones_and_replays_happened() -> None:
    """Three sequences, of which one leaves, over a change of the table's length; every state and every logit."""
    lengths = [1010, 37, 200]
    texts = [random_ids(1100, 50 + s, 8_000) for s in range(3)]
    config = EngineConfig(str(TINY_HYBRID), device="cuda", grid=GRID)
    with torch.inference_mode():
        model = load_model(config, lambda _done, _total: None).model
        tables = [[1 + 40 * s + b for b in range(40)] for s in range(3)]
        seen: list[list[torch.Tensor]] = []
        steps: list[DecodeStep] = []
        for captures in (True, False):
            pools = DevicePools(model.layout(64), 128, 8, model.facts.device)
            for s, length in enumerate(lengths):
                rows = SequenceRows(texts[s][:length], 0, tables[s], 2 + s, 2 + s)
                finish(model.forward(make_batch([rows], 64, model.facts.device), pools))
            step = DecodeStep(model, pools, captures=captures)
            step.prepare(4)
            before = step.counts.replayed
            found: list[torch.Tensor] = []
            for t in range(30):
                alive = [0, 1, 2] if t < 20 else [2, 0]
                draw = [Draw(), Draw(temperature=0.7, top_p=0.9, number=0.3), None]
                ends = [lengths[s] + t for s in range(3)]
                decoded = step.run(
                    [
                        DecodeRow(texts[s][ends[s]], ends[s], tables[s][: ends[s] // 64 + 1], 2 + s, draw[s])
                        for s in alive
                    ]
                )
                assert [token is None for token in decoded.tokens] == [s == 2 for s in alive]
                found += [decoded.logits.clone(), torch.tensor([token or 0 for token in decoded.tokens])]
            assert step.counts.replayed - before == (30 if captures else 0)
            assert step.counts.eager == (0 if captures else 30)
            assert step.counts.failed_captures == 0
            seen.append([*found, pools.slots[2:5].clone(), pools.blocks[1:].clone()])
            steps.append(step)
        assert len(steps[0].graphs()) > 3
        for replayed, eager in zip(*seen, strict=True):
            assert torch.equal(replayed, eager)


def test_steps_ahead_of_the_host_have_the_bytes_of_steps_whose_tokens_it_knows() -> None:
    """Over a change of the table's length, whose graph is captured while a step is under way."""
    lengths, texts = [1010, 37], [random_ids(1010, 50 + s, 8_000) for s in range(2)]
    config = EngineConfig(str(TINY_HYBRID), device="cuda", grid=GRID)
    with torch.inference_mode():
        model = load_model(config, lambda _done, _total: None).model
        tables = [[1 + 40 * s + b for b in range(40)] for s in range(2)]
        seen: list[list[object]] = []
        for is_ahead in (True, False):
            pools = DevicePools(model.layout(64), 128, 8, model.facts.device)
            for s, length in enumerate(lengths):
                rows = SequenceRows(texts[s][:length], 0, tables[s], 2 + s, 2 + s)
                finish(model.forward(make_batch([rows], 64, model.facts.device), pools))
            step = DecodeStep(model, pools, captures=True)
            tokens: list[tuple[int | None, ...]] = [(11, 12)]
            flying: Launched | None = None
            for t in range(40):
                draws = Draw(), Draw(temperature=0.9, number=(t + 0.5) / 40)
                ids = [LAST, LAST] if is_ahead and t else [token or 0 for token in tokens[-1]]
                ends = [length + t for length in lengths]
                launched = step.launch(
                    [DecodeRow(ids[s], ends[s], tables[s][: ends[s] // 64 + 1], 2 + s, draws[s]) for s in range(2)]
                )
                if not is_ahead:
                    tokens.append(launched.wait().tokens)
                elif flying is not None:
                    tokens.append(flying.wait().tokens)
                flying = launched
            if is_ahead and flying is not None:
                tokens.append(flying.wait().tokens)
            assert step.counts.replayed == 40
            assert step.counts.captured == 2
            seen.append([tokens, _digest(pools.slots[2:4]), _digest(pools.blocks[1:])])
        assert seen[0] == seen[1]


def test_an_engine_whose_steps_fly_answers_as_one_that_waits_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, so that batches are the same; and at once after one that was cut off, in what that one held."""
    config = EngineConfig(str(TINY_HYBRID), device="cuda", grid=GRID, max_sequences=1)
    prompts = [random_ids(length, 80 + length, 8_000) for length in (300, 1023, 1500)]
    answers: list[list[tuple[int, ...]]] = []
    for flies in (True, False):
        if not flies:
            monkeypatch.setattr(Flights, "_ahead", lambda self, flying: None)
        probe = Probe(config)
        step = probe.engine.runner.step
        assert step is not None
        answers.append([probe.run(prompt, 50).answer for prompt in prompts])
        params = SamplingParams(seed=0, temperature=0.0)
        cut = Submit("cut", array("i", random_ids(700, 99, 8_000)).tobytes(), 1, 400, 0, (), params, "")
        probe.begin("cut")
        probe.engine.handle(cut)
        with torch.inference_mode():
            for _ in range(12):
                probe.engine.step()
        probe.engine.handle(Abort("cut"))
        probe.forget()
        answers[-1] += [probe.run(prompt, 50).answer for prompt in prompts]
        assert (step.counts.ahead > 100) == flies
        probe.engine.close()
    assert answers[0] == answers[1]
    assert answers[0][:3] == answers[0][3:]


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().data).hexdigest()


@pytest.mark.parametrize("tier", ["host", "spill"])
def test_a_sequence_larger_than_the_device_has_the_bytes_of_a_resident_one(tier: str, tmp_path: Path) -> None:
    """Of the draw after its prompt: logits, every plane wherever its blocks are, every slot. Its tokens follow."""
    grid, prompt = 256, random_ids(3100, 71, 8_000)
    settings = {"device": "cuda", "grid": grid, "max_sequences": 1, "break_even": False}
    whole = LongProbe(EngineConfig(str(TINY_HYBRID), pool_bytes=1 << 28, **settings))  # type: ignore[arg-type]
    expected, answer = whole.serve(prompt, 30), whole.answer()
    whole.engine.close()
    layout = whole.engine.device.layout
    room = {"pool_bytes": 6 * layout.slot_bytes + (2 * grid // 64 + 6) * layout.block_bytes, "stream_share": 0.0}
    below = {"host_bytes": 1 << 28} if tier == "host" else {"disk_path": str(tmp_path), "spill_bytes": 1 << 28}
    probe = LongProbe(EngineConfig(str(TINY_HYBRID), **settings, **room, **below))  # type: ignore[arg-type]
    found = probe.serve(prompt, 30)
    assert probe.most_read_bytes > 0, "nothing was streamed"
    assert min(residence.host + residence.spill for residence in probe.residences) > 0, "everything was resident"
    assert found[0] == expected[0]
    assert probe.answer() == answer
    probe.engine.close()


FAULTS = """
import torch
from daemon.engine.faults import DeviceFault, end_if_sticky
device = torch.device("cuda")
nowhere = torch.tensor([9], device=device)
for work in (lambda: torch.empty(1 << 50, device=device), lambda: torch.zeros(4, device=device)[nowhere]):
    try:
        work()
        torch.cuda.synchronize()
    except RuntimeError as error:
        try:
            end_if_sticky(error, device)
            print("goes on")
        except DeviceFault as fault:
            print("ends", fault)
"""


def test_a_lost_device_ends_the_engine_and_a_full_one_does_not() -> None:
    run = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=120, check=False)
    said = run.stdout.splitlines()
    assert said[0] == "goes on", run.stderr
    assert said[1].startswith("ends cuda: CUDA error"), run.stdout


LEDGER = """
import json, torch
from daemon.config import EngineConfig
from daemon.messages import Query, QueryKind
from ops.models.shipped import TINY_HYBRID
from tests.exact.probe import Probe
from tests.exact.longctx import LongProbe
from tests.exact.probe import Probe
from tests.exact.test_exact import random_ids

probe = Probe(EngineConfig(str(TINY_HYBRID), device="cuda", host_bytes=1 << 28, pool_bytes=1 << 29, max_sequences=64))
answers = []

def look():
    torch.cuda.synchronize()
    send, probe.engine.send = probe.engine.send, answers.append
    probe.engine.handle(Query(1, QueryKind.LEDGER))
    probe.engine.send = send
    rows = [row for row in answers.pop().ledger if row.tier == "device"]
    scratch = next(row.bytes for row in rows if row.owner == "engine")
    return [sum(row.bytes for row in rows), torch.cuda.memory_allocated(), scratch]

found = []
for turn in range(3):
    for number in range(12):
        probe.forget()
        probe.run(random_ids(100 + 173 * number, number, 8_000), 6)
    found.append(look())
print(json.dumps(found))
"""


def test_the_ledger_of_the_device_sums_to_the_allocators_figure_and_stays_there() -> None:
    run = subprocess.run([sys.executable, "-c", LEDGER], capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert all(declared == allocated for declared, allocated, _ in found)
    scratch = [row[2] for row in found]
    assert 0 <= scratch[0] < 256 << 20
    assert scratch[1] == scratch[2], "the engine's own memory grows"


def test_a_mixed_batch_equals_its_members_alone_within_rounding() -> None:
    config = EngineConfig(str(TINY_HYBRID), device="cuda", grid=GRID)
    lengths = [700, 65, 333, 1]
    with torch.inference_mode():
        model = load_model(config, lambda _done, _total: None).model
        tables = [[1 + 16 * s + b for b in range(16)] for s in range(4)]
        outs: list[torch.Tensor] = []
        for together in (True, False):
            pools = DevicePools(model.layout(64), 80, 8, model.facts.device)
            for s, length in enumerate(lengths):
                rows = SequenceRows(random_ids(length, 60 + s, 8_000), 0, tables[s], 2 + s, 2 + s)
                finish(model.forward(make_batch([rows], 64, model.facts.device), pools))
            step = DecodeStep(model, pools, captures=True)
            rows = [DecodeRow(9, n, tables[s], 2 + s, Draw()) for s, n in enumerate(lengths)]
            parts = [rows] if together else [[row] for row in rows]
            outs.append(torch.cat([step.run(part).logits.clone() for part in parts]))
        error = torch.linalg.vector_norm(outs[0] - outs[1]) / torch.linalg.vector_norm(outs[1])
        assert float(error) < 2e-2
