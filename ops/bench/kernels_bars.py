"""What the kernels are held to on an H200, and whether a run of the benchmark reached it.

Every bar is a ratio within one run: to the floor that the run's own ceilings give, or to a peer beside it. A few are
times that a model's step was planned with.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from ops.bench.kernels_timing import Measured


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a row and how it is compared."""

    unit: str
    of: Callable[[Measured, list[Measured]], float | None]  # of our way and its peers; None: a peer is not there
    is_most: bool  # the bar is an upper limit


@dataclass(frozen=True, slots=True)
class Bar:
    """One row's bar."""

    group: int  # rows that belong together
    row: str  # its whole name
    figure: Figure
    limit: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """A bar beside what was measured."""

    group: int
    row: str
    unit: str
    limit: float
    figure: float | None  # None: it was not measured
    holds: bool | None


PERCENT_OF_FLOOR = Figure("% of floor", lambda ours, _: ours.percent_of_floor, is_most=False)
FLOORS = Figure("x floor", lambda ours, _: ours.us / ours.floor_us, is_most=True)
MICROSECONDS = Figure("us", lambda ours, _: ours.us, is_most=True)
TFLOPS = Figure("TFLOP/s", lambda ours, _: ours.tflops, is_most=False)


def _times_faster(peer: str) -> Figure:
    """Than the fastest peer whose name begins so; by FLOPs a second, where a peer computes more of them."""

    def of(ours: Measured, peers: list[Measured]) -> float | None:
        ratios = [_ratio(ours, one) for one in peers if one.way.startswith(peer) and one.failure is None]
        return min(ratios, default=None)

    return Figure(f"x {peer}", of, is_most=False)


def _ratio(ours: Measured, peer: Measured) -> float:
    if ours.tflops and peer.tflops:
        return ours.tflops / peer.tflops
    return peer.us / ours.us


_DECODE = {
    "decode B1 128K 32/8x128": 97.0,
    "decode B32 4K 32/8x128": 97.0,
    "decode B8 128K 16/2x256": 97.0,
    "decode B1 128K 16/2x256": 85.0,
    "decode B1 128K 32/8x128 fp8": 85.0,
    "decode B8 128K 16/2x256 fp8": 85.0,
}
_WIDE_PREFILL = ("prefill 16K 32/8x128", "prefill 8K over 128K 32/8x128", "prefill 4K over 32K 32/8x128")
_DEEP_PREFILL = ("prefill 16K 16/2x256", "prefill 4K over 32K 16/2x256")
BARS = (
    *(Bar(1, row, PERCENT_OF_FLOOR, percent) for row, percent in _DECODE.items()),
    Bar(1, "decode ragged 1K-128K 32/8x128", PERCENT_OF_FLOOR, 85.0),
    Bar(1, "MLA B4 128K 32 heads", PERCENT_OF_FLOOR, 85.0),
    *(Bar(1, row, _times_faster("SDPA"), 1.0) for row in (*_DECODE, "decode B1 32K 16/2x256")),
    *(Bar(2, row, TFLOPS, 470.0) for row in _WIDE_PREFILL),
    *(Bar(2, row, _times_faster("SDPA flash"), 1.0) for row in _DEEP_PREFILL),
    Bar(3, "GDN prefill 32K", MICROSECONDS, 900.0),
    Bar(3, "GDN prefill 32K", _times_faster("fla"), 2.0),
    Bar(3, "KDA prefill 8K", _times_faster("fla"), 1.5),
    Bar(3, "KDA prefill 32K", _times_faster("fla"), 1.5),
    Bar(3, "GDN decode B64", PERCENT_OF_FLOOR, 85.0),
    Bar(4, "sparse MLA B64 2048 128 heads", PERCENT_OF_FLOOR, 50.0),
    Bar(4, "indexer + top-2048 B8 128K bf16", FLOORS, 2.0),
    Bar(4, "indexer + top-2048 B8 128K fp8", FLOORS, 2.0),
    Bar(5, "MoE 256 experts top 8, B1", MICROSECONDS, 30.0),
    Bar(5, "MoE 256 experts top 8, B16", FLOORS, 1.3),
    Bar(5, "MoE 256 experts top 8, B64", FLOORS, 1.3),
    Bar(5, "MoE 256 experts top 8, B4096", FLOORS, 1.5),
    Bar(5, "sampling 64 x 152K", MICROSECONDS, 25.0),
)


def outcomes(results: list[Measured]) -> list[Outcome]:
    """Every bar beside the first way of its row."""
    return [_outcome(bar, [one for one in results if one.row == bar.row]) for bar in BARS]


def _outcome(bar: Bar, of_row: list[Measured]) -> Outcome:
    figure = None
    if of_row and of_row[0].failure is None:
        figure = bar.figure.of(of_row[0], [one for one in of_row if one.is_peer])
    holds = None
    if figure is not None:
        holds = figure <= bar.limit if bar.figure.is_most else figure >= bar.limit
    return Outcome(bar.group, bar.row, bar.figure.unit, bar.limit, figure, holds)


def format_outcomes(found: list[Outcome]) -> str:
    """One line a bar."""
    lines = [f"{'bar':<4} {'row':<34} {'wanted':>20} {'measured':>10}"]
    for one in found:
        sign = "<=" if one.unit in (MICROSECONDS.unit, FLOORS.unit) else ">="
        wanted = f"{sign} {one.limit:g} {one.unit}"
        measured = "-" if one.figure is None else f"{one.figure:.1f}" if one.figure >= 20 else f"{one.figure:.2f}"
        verdict = {True: "holds", False: "missed", None: "not measured"}[one.holds]
        lines.append(f"{one.group:<4} {one.row:<34} {wanted:>20} {measured:>10} {verdict}")
    reached = sum(one.holds is True for one in found)
    return "\n".join([*lines, f"{reached} of {len(found)} bars hold"])


def as_record(found: list[Outcome]) -> list[dict[str, object]]:
    """For a file."""
    return [asdict(one) for one in found]
