"""The recurrent mixers and their slots: who reads and writes which, and that every way of running gives one result."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import pytest
import torch

from daemon.batch import Batch, SequenceRows, make_batch
from daemon.layers.caps import LayerCaps
from daemon.layers.gated_delta_net import GatedDeltaNet, GatedDeltaSizes
from daemon.layers.inputs import Inputs
from daemon.layers.kda import KdaConfig, KimiDeltaAttention
from daemon.layers.linear import Linear
from daemon.layers.mamba2 import Mamba2Config, Mamba2Mixer
from daemon.layers.parameters import Parameters, Scope
from daemon.layers.steps import Steps
from daemon.models.base import finish
from kernels.paged_attention import AttentionPlan
from tiers.layout import SlotTensor, StateLayout
from tiers.pools import DevicePools

HIDDEN, CPU, BLOCK = 24, torch.device("cpu"), 4
NO_ATTENTION = AttentionPlan(0, (), None)

torch.set_num_threads(1)


class Mixer(Protocol):
    caps: LayerCaps
    slots: tuple[SlotTensor, ...]

    def forward(self, hidden: torch.Tensor, inputs: Inputs, pools: DevicePools) -> Steps: ...


@dataclass(frozen=True, slots=True)
class Built:
    mixer: Mixer

    @property
    def state(self) -> tuple[SlotTensor, ...]:
        return self.mixer.slots


def filled(make: Callable[[Scope], Mixer]) -> Built:
    """A mixer whose weights are all random."""
    parameters = Parameters(CPU, torch.float32)
    mixer = make(parameters.root)
    for name, target in parameters.targets.items():
        generator = torch.Generator().manual_seed(len(name))
        target.view.copy_(torch.randn(target.view.shape, generator=generator) / target.view.shape[-1] ** 0.5)
    parameters.finish()
    return Built(mixer)


def gated_delta() -> Built:
    def make(scope: Scope) -> Mixer:
        sizes = GatedDeltaSizes(k_heads=2, v_heads=4, dk=6, dv=5, conv_taps=4)
        in_proj = Linear(scope, (("in_proj", sum(sizes.projection_parts)),), HIDDEN)
        return GatedDeltaNet(scope, 0, sizes, in_proj, norm_eps=1e-6)

    return filled(make)


def kda(lower_bound: float | None) -> Built:
    config = KdaConfig(
        hidden_size=HIDDEN,
        heads=3,
        head_dim=6,
        conv_taps=3,
        decay_rank=5,
        gate_rank=7,
        a_log_shape=(1, 1, 3, 1),
        norm_eps=1e-5,
        lower_bound=lower_bound,
        is_conv_wide=lower_bound is not None,
    )
    return filled(lambda scope: KimiDeltaAttention(scope, 0, config))


def mamba2() -> Built:
    config = Mamba2Config(
        hidden_size=HIDDEN,
        heads=4,
        head_dim=5,
        groups=2,
        state_dim=7,
        conv_taps=4,
        conv_bias=True,
        proj_bias=True,
        time_step_min=1e-3,
        norm_eps=1e-5,
    )
    return filled(lambda scope: Mamba2Mixer(scope, 0, config))


BUILDERS = [
    pytest.param(gated_delta, id="gated_delta_net"),
    pytest.param(lambda: kda(None), id="kda"),
    pytest.param(lambda: kda(-5.0), id="kda_bounded"),
    pytest.param(mamba2, id="mamba2"),
]
every_mixer = pytest.mark.parametrize("build", BUILDERS)
Builder = Callable[[], Built]


def make_pools(state: tuple[SlotTensor, ...], num_slots: int = 8) -> DevicePools:
    """Slots 0 and 1 are fresh, all others full of NaN."""
    pools = DevicePools(StateLayout((), state, BLOCK), 1, num_slots, CPU)
    for name in pools.slot_tensors:
        pools.slot_tensors[name][2:] = float("nan")
    return pools


def rows_of(num_rows: int, start: int = 0, *, slot_in: int, slot_out: int) -> SequenceRows:
    return SequenceRows([0] * num_rows, start, [0] * 200, slot_in, slot_out)


def run(built: Built, pools: DevicePools, hidden: torch.Tensor, *sequences: SequenceRows) -> torch.Tensor:
    return run_batch(built, pools, hidden, make_batch(list(sequences), BLOCK, CPU))


def run_batch(built: Built, pools: DevicePools, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
    return finish(built.mixer.forward(hidden, Inputs(batch, NO_ATTENTION, None, ()), pools))


def hidden_rows(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((num_rows, HIDDEN), generator=torch.Generator().manual_seed(seed))


def slot_bytes(pools: DevicePools, slot_id: int) -> torch.Tensor:
    return pools.slots[slot_id].clone()


def slot_states(pools: DevicePools, slot_id: int) -> list[torch.Tensor]:
    return [view[slot_id].clone() for view in pools.slot_tensors.values()]


@every_mixer
def test_pieces_and_single_rows_give_what_one_chunk_gives(build: Builder) -> None:
    built, hidden = build(), hidden_rows(37)
    whole_pools = make_pools(built.state)
    whole = run(built, whole_pools, hidden, rows_of(37, slot_in=0, slot_out=0))
    for pieces in ([20, 17], [1, 1, 2, 33], [30, 1, 1, 1, 1, 1, 1, 1]):
        pools, outs, start = make_pools(built.state), [], 0
        for length in pieces:
            part = hidden[start : start + length]
            outs.append(run(built, pools, part, rows_of(length, start, slot_in=0, slot_out=0)))
            start += length
        torch.testing.assert_close(torch.cat(outs), whole, atol=1e-5, rtol=1e-5)
        for got, want in zip(slot_states(pools, 0), slot_states(whole_pools, 0), strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@every_mixer
def test_a_chunk_resumed_from_a_copied_slot_gives_the_bytes_of_a_cold_run(build: Builder) -> None:
    built, hidden, grid = build(), hidden_rows(5 * 16 + 3), 16
    cold = make_pools(built.state)
    outs: list[torch.Tensor] = []
    saved = [slot_bytes(cold, 0)]
    for start in range(0, len(hidden), grid):
        part = hidden[start : start + grid]
        outs.append(run(built, cold, part, rows_of(len(part), start, slot_in=0, slot_out=0)))
        saved.append(slot_bytes(cold, 0))
    for k in range(1, 6):
        resumed = make_pools(built.state)
        resumed.slots[5].copy_(saved[k])
        for i, start in enumerate(range(k * grid, len(hidden), grid)):
            part = hidden[start : start + grid].clone()
            out = run(built, resumed, part, rows_of(len(part), start, slot_in=5, slot_out=5))
            assert torch.equal(out, outs[k + i])
        assert torch.equal(slot_bytes(resumed, 5), saved[-1])


@every_mixer
@pytest.mark.parametrize("num_rows", [1, 7])
def test_state_goes_from_slot_in_to_slot_out_and_no_other_slot_is_touched(build: Builder, num_rows: int) -> None:
    built = build()
    pools = make_pools(built.state)
    before = [slot_bytes(pools, s) for s in range(8)]
    out = run(built, pools, hidden_rows(num_rows), rows_of(num_rows, slot_in=1, slot_out=4))
    assert out.isfinite().all()
    assert not torch.equal(slot_bytes(pools, 4), before[4])
    assert all(state.isfinite().all() for state in slot_states(pools, 4))
    assert all(torch.equal(slot_bytes(pools, s), before[s]) for s in (0, 1, 2, 3, 5, 6, 7))


@every_mixer
def test_a_batch_equals_its_members_alone_in_any_order(build: Builder) -> None:
    """Decode rows, ragged chunks and k rows each: rows or slots that alias would show at once."""
    built = build()
    assert built.mixer.caps.batched_decode
    assert built.mixer.caps.verify_rows
    for lengths in ([1, 1, 1, 1, 1], [3, 3, 3, 3, 3], [5, 1, 9, 1, 2]):
        hidden = [hidden_rows(n, seed) for seed, n in enumerate(lengths)]
        pools = make_pools(built.state)
        for s in range(5):  # each sequence has a history of its own
            pools.clear_slot(s + 2)
            run(built, pools, hidden_rows(4 + s, 100 + s), rows_of(4 + s, slot_in=s + 2, slot_out=s + 2))
        history = pools.slots.clone()
        alone: list[torch.Tensor] = []
        for s, n in enumerate(lengths):
            alone.append(run(built, pools, hidden[s], rows_of(n, 4 + s, slot_in=s + 2, slot_out=s + 2)))
        after = [slot_states(pools, s + 2) for s in range(5)]
        for order in ([0, 1, 2, 3, 4], [3, 0, 4, 2, 1]):
            pools.slots.copy_(history)
            sequences = [rows_of(lengths[s], 4 + s, slot_in=s + 2, slot_out=s + 2) for s in order]
            out = run(built, pools, torch.cat([hidden[s] for s in order]), *sequences)
            torch.testing.assert_close(out, torch.cat([alone[s] for s in order]), atol=1e-5, rtol=1e-5)
            for s in range(5):
                for got, want in zip(slot_states(pools, s + 2), after[s], strict=True):
                    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@every_mixer
def test_the_same_ids_tensors_replay_with_other_contents(build: Builder) -> None:
    """What a captured graph does: nothing but device tensors tells a decode step whose slots it meets."""
    built = build()
    assert built.mixer.caps.graph_capture
    pools = make_pools(built.state)
    pools.clear_slot(6)
    run(built, pools, hidden_rows(9, 7), rows_of(9, slot_in=6, slot_out=6))
    batch = make_batch([rows_of(1, 0, slot_in=0, slot_out=0), rows_of(1, 0, slot_in=1, slot_out=1)], BLOCK, CPU)
    batch.slot_in.copy_(torch.tensor([6, 1]))
    batch.slot_out.copy_(torch.tensor([3, 4]))
    hidden = hidden_rows(2, 9)
    replayed = run_batch(built, pools, hidden, batch)
    want = run(built, pools, hidden[:1], rows_of(1, 9, slot_in=6, slot_out=5))
    torch.testing.assert_close(replayed[:1], want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(slot_states(pools, 3)[1], slot_states(pools, 5)[1], atol=1e-5, rtol=1e-5)


@every_mixer
def test_a_slot_cleared_after_a_longer_sequence_gives_the_bytes_of_a_fresh_one(build: Builder) -> None:
    built, hidden = build(), hidden_rows(21)
    fresh = make_pools(built.state)
    want = run(built, fresh, hidden, rows_of(21, slot_in=0, slot_out=0))
    used = make_pools(built.state)
    run(built, used, hidden_rows(90, 5), rows_of(90, slot_in=0, slot_out=0))
    used.clear_slot(0)
    assert torch.equal(run(built, used, hidden, rows_of(21, slot_in=0, slot_out=0)), want)
    assert torch.equal(slot_bytes(used, 0), slot_bytes(fresh, 0))


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        GatedDeltaSizes(k_heads=3, v_heads=4, dk=2, dv=2, conv_taps=4)
    with pytest.raises(ValueError, match="do not divide"):
        Mamba2Config(
            hidden_size=8,
            heads=4,
            head_dim=2,
            groups=3,
            state_dim=2,
            conv_taps=4,
            conv_bias=True,
            proj_bias=False,
            time_step_min=1e-3,
            norm_eps=1e-5,
        )
