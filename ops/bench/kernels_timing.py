"""Rows of the kernel benchmark: what is run, how it is timed, and the floor it is held against.

A row has one or more sets of inputs, made so that all sets together exceed the L2 cache several times; a timed round
goes over all sets once. Each way of computing the row (ours, its peers, other tiles of ours) is captured as one CUDA
graph over the sets, and its time is the median of its replays. Ways take turns within a row's memory, not in time: the
same card, the same minute.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU can check what rows compute, not time it
L2_BYTES = 64 << 20
ROTATED_BYTES = 5 * L2_BYTES  # of inputs at least
MOST_SETS = 64
ROUND_MS = 3.0  # a timed round is repeated until it lasts about this long
ROUNDS = 15

Run = Callable[[], object]
"""Launches one computation; what it returns is kept until the next one, and compared where the row says how."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way of computing a row."""

    name: str
    make: Callable[[object], Run]  # from a set of inputs
    flops: float | None = None  # where it does others than the row says
    is_peer: bool = False
    capture: bool = True  # False: timed without a graph
    exact: bool = True  # False: computes more than the row, as its FLOPs say, and is compared with nothing


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    make_inputs: Callable[[int], object]  # a set of inputs from a seed
    input_bytes: float  # of one set
    ways: list[Way]  # ours first
    sweep: list[Way]  # other tiles of ours
    read_bytes: float = 0.0  # that the computation cannot do without
    written_bytes: float = 0.0
    flops: float = 0.0  # of the matrix units
    host_bytes: float = 0.0  # over the link, one way
    error: Callable[[object, object], float] | None = None  # of a result, from its inputs: relative, by norm
    paper_floor_us: float | None = None  # where the floor is another than bytes or FLOPs of these inputs


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this card was seen to do."""

    read_bytes_per_s: float
    copy_bytes_per_s: float  # read and written, counted both
    flops: float  # bf16, a second
    host_bytes_per_s: float

    def floor_us(self, row: Row) -> float:
        """The time that no way can beat by much."""
        moved_s = row.read_bytes / self.read_bytes_per_s + row.written_bytes / self.copy_bytes_per_s
        seconds = max(moved_s, row.flops / self.flops, row.host_bytes / self.host_bytes_per_s)
        return 1e6 * seconds


@dataclass(frozen=True, slots=True)
class Measured:
    """One way of one row, timed."""

    row: str
    way: str
    us: float
    floor_us: float
    tflops: float | None
    gbytes_per_s: float | None
    error: float | None
    captured: bool
    is_peer: bool
    failure: str | None = None

    @property
    def percent_of_floor(self) -> float:
        """100: as fast as the ceilings allow."""
        return 100 * self.floor_us / self.us if self.us else math.nan


def measure(row: Row, ceilings: Ceilings, *, sweep: bool, time_left_s: Callable[[], float]) -> list[Measured]:
    """Times every way of a row; a way that fails is listed with its failure. A sweep stops when no time is left."""
    num_sets = min(MOST_SETS, max(1, math.ceil(ROTATED_BYTES / row.input_bytes)))
    sets = [row.make_inputs(seed) for seed in range(num_sets)]
    results: list[Measured] = []
    for way in row.ways:
        results.append(_measure_way(row, way, sets, ceilings))
    for way in row.sweep if sweep else []:
        if time_left_s() < 0:
            break
        results.append(_measure_way(row, way, sets, ceilings))
    del sets
    torch.cuda.empty_cache()
    return results


def _measure_way(row: Row, way: Way, sets: list[object], ceilings: Ceilings) -> Measured:
    floor_us = row.paper_floor_us or ceilings.floor_us(row)
    try:
        runs = [way.make(inputs) for inputs in sets]
        error = row.error(runs[0](), sets[0]) if row.error is not None and way.exact else None
        us, captured = time_us(runs, capture=way.capture)
    except Exception as failure:  # one way's failure is that line of the table
        torch.cuda.synchronize()
        text = f"{type(failure).__name__}: {failure}".splitlines()[0][:120]
        return Measured(row.name, way.name, 0.0, floor_us, None, None, None, False, way.is_peer, text)
    flops = way.flops if way.flops is not None else row.flops
    moved = row.read_bytes + row.written_bytes + row.host_bytes
    return Measured(
        row=row.name,
        way=way.name,
        us=us,
        floor_us=floor_us,
        tflops=flops / us / 1e6 if flops else None,
        gbytes_per_s=moved / us / 1e3 if moved else None,
        error=error,
        captured=captured,
        is_peer=way.is_peer,
    )


def time_us(runs: list[Run], *, capture: bool = True) -> tuple[float, bool]:
    """Median microseconds of one run, over rounds of all of them; and whether they were captured as a graph."""
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    graph: torch.cuda.CUDAGraph | None = None
    if capture:
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for run in runs:
                    run()
        except Exception:  # some peers synchronise
            graph = None
            torch.cuda.synchronize()

    def replay() -> None:
        if graph is not None:
            graph.replay()
        else:
            for run in runs:
                run()

    first_ms = _events_ms(replay, 1)
    repeats = max(1, min(200, round(ROUND_MS / max(first_ms, 1e-3))))
    rounds = ROUNDS if first_ms < 200 else 3
    samples = [_events_ms(replay, repeats) / repeats for _ in range(rounds)]
    return 1e3 * median(samples) / len(runs), graph is not None


def _events_ms(run: Callable[[], None], repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """||out - expected|| / ||expected||; NaN where out has one."""
    expected = expected.double()
    return float(torch.dist(out.double(), expected) / torch.dist(expected, torch.zeros_like(expected)))


def seeded(seed: int) -> None:
    """The inputs that follow are the same on every run."""
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]


def format_table(results: list[Measured]) -> str:
    """One line a way; ours and peers of a row together, sweeps by time."""
    lines = [f"{'row':<34} {'way':<34} {'us':>10} {'floor':>9} {'%':>6} {'TFLOP/s':>8} {'GB/s':>7} {'error':>8}"]
    for one in results:
        if one.failure is not None:
            lines.append(f"{one.row:<34} {one.way:<34} failed: {one.failure}")
            continue
        rate = f"{one.tflops:8.0f}" if one.tflops else f"{'':>8}"
        moved = f"{one.gbytes_per_s:7.0f}" if one.gbytes_per_s else f"{'':>7}"
        error = f"{one.error:8.1e}" if one.error is not None else f"{'':>8}"
        mark = "" if one.captured else " (no graph)"
        lines.append(
            f"{one.row:<34} {one.way:<34} {one.us:10.1f} {one.floor_us:9.1f} {one.percent_of_floor:6.1f} "
            f"{rate} {moved} {error}{mark}"
        )
    return "\n".join(lines)
