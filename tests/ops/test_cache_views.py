"""What an operator reads, whole: every table of the cache's commands, from answers that a daemon might give."""

import io
from textwrap import dedent

import pytest
from downcore.v1 import admin_pb2
from downcore.v1 import cache_pb2 as pb
from rich.console import Console, RenderableType

from ops.cli.errors import CliError
from ops.cli.output import brief_seconds, counted, make_facts
from ops.cli.prefix_view import lookup_facts, lookup_table, prefix_facts, prefix_table, receipt_table
from ops.cli.quantities import parse_bytes, parse_seconds
from ops.cli.quota import quota_table
from ops.cli.tiers_view import stat_header, stat_line, tier_facts, tier_rates, tier_table

NOW_S = 1_800_000_000.0
GIB, MIB = 1 << 30, 1 << 20
SHORT, LONG, OTHER = "3f09ab52c1d7" + "0" * 52, "b41c77e0d92a" + "1" * 52, "77d0e1f2a3b4" + "2" * 52

PREFIXES = (
    pb.Prefix(
        key=SHORT, namespace="default", tokens=4096, blocks=64, checkpoints=1, hits=1207,
        bytes=pb.BytesByTier(device=90 * MIB, host=90 * MIB, disk=62 * MIB), pinned=True,
        expires_time_s=NOW_S + 3600, last_use_time_s=NOW_S - 4,
    ),
    pb.Prefix(
        key=LONG, parent_key=SHORT, namespace="default", tokens=126_976, blocks=1920, checkpoints=3, hits=1,
        bytes=pb.BytesByTier(disk=GIB + 700 * MIB), last_use_time_s=NOW_S - 200_000,
    ),
    pb.Prefix(
        key=OTHER, namespace="default", tokens=1024, blocks=16, checkpoints=1,
        bytes=pb.BytesByTier(host=23 * MIB), expires_time_s=NOW_S + 75, last_use_time_s=NOW_S - 3700,
    ),
)  # fmt: skip

DISK = admin_pb2.Tier(
    name="disk", medium="ext4, direct I/O", capacity_bytes=200 * GIB, held_bytes=0, cached_bytes=154 * GIB,
    free_bytes=46 * GIB, pinned_bytes=12 * GIB, hit_tokens=9_300_416, miss_tokens=1_048_576, evicted_blocks=5120,
    blocks=142_000, free_blocks=32_000, cached_blocks=110_000, dirty_bytes=96 * MIB, used_bytes=156 * GIB,
    quota_bytes=200 * GIB, reads=41_233, read_bytes=61 * GIB, read_s=92.5, writes=110_000, written_bytes=160 * GIB,
    write_s=512.0, dropped_writes=31, verify_failures=2, quarantined=1, gate_refusals=12,
    state=admin_pb2.TIER_STATE_READ_ONLY, state_reason="no space is left on the device",
)  # fmt: skip
DEVICE = admin_pb2.Tier(
    name="device", medium="cpu", capacity_bytes=8 * GIB, held_bytes=3 * GIB, cached_bytes=5 * GIB - 64 * MIB,
    free_bytes=64 * MIB, hit_tokens=44_040_192, miss_tokens=10_348_992, evicted_blocks=88, blocks=5800, free_blocks=45,
    cached_blocks=3600, slots=66, free_slots=60, state=admin_pb2.TIER_STATE_OK, host_free_bytes=11 * GIB,
)  # fmt: skip

LOOKUP = pb.LookupPrefixResponse(
    prompt_tokens=131_072, matched_tokens=126_976, resume_tokens=122_880, key=LONG,
    tiers=[
        pb.LookupTier(tier=pb.CACHE_TIER_DEVICE, tokens=4096, bytes=90 * MIB),
        pb.LookupTier(tier=pb.CACHE_TIER_DISK, tokens=118_784, bytes=GIB, load_s=0.61),
    ],
    checkpoint=pb.CheckpointPlace(position=122_880, tier=pb.CACHE_TIER_DISK), load_s=0.61, compute_s=97.0,
    gate=pb.GATE_DECISION_LOAD, stop_reason="NO_CHECKPOINT",
    stop="blocks are known further, but no checkpoint of the recurrent state",
)  # fmt: skip
RECEIPT = pb.WarmReceipt(
    key="night", time_s=NOW_S,
    prefixes=[
        pb.WarmedPrefix(
            key=LONG, tokens=126_976, cached_tokens=4096, bytes=pb.BytesByTier(device=2 * GIB, disk=GIB + 700 * MIB),
            durable=True, pinned=True, expires_time_s=NOW_S + 7 * 86_400,
        ),
        pb.WarmedPrefix(key=OTHER, tokens=1024, cached_tokens=1024, bytes=pb.BytesByTier(host=23 * MIB)),
    ],
)  # fmt: skip


def shown(renderable: RenderableType) -> str:
    """As a terminal of 120 columns shows it, without colours and without blanks at the ends of lines."""
    console = Console(width=120, file=io.StringIO(), highlight=False)
    console.print(renderable)
    output = console.file
    assert isinstance(output, io.StringIO)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def page(text: str) -> str:
    return dedent(text).strip("\n")


def test_prefixes_are_a_line_each() -> None:
    assert shown(prefix_table(PREFIXES, NOW_S)) == page("""
    key           continues      tokens  blocks    device      host      disk   hits  last use  kept
    ────────────────────────────────────────────────────────────────────────────────────────────────────────────
    3f09ab52c1d7  -               4,096      64  90.0 MiB  90.0 MiB  62.0 MiB  1,207        4s  pinned for 1h 0m
    b41c77e0d92a  3f09ab52c1d7  126,976   1,920         -         -   1.7 GiB      1     2d 7h  -
    77d0e1f2a3b4  -               1,024      16         -  23.0 MiB         -      0     1h 1m  for 1m 15s
    """)


def test_a_prefix_in_full() -> None:
    assert shown(make_facts(prefix_facts(PREFIXES[0], NOW_S))) == page("""
    key        3f09ab52c1d70000000000000000000000000000000000000000000000000000
    namespace  default
    tokens     4,096 from the beginning
    continues  no other prefix
    adds       64 blocks, 1 checkpoint: 90.0 MiB device, 90.0 MiB host, 62.0 MiB disk
    kept       pinned for 1h 0m
    last use   4s ago
    hits       1,207
    """)


def test_a_prefix_that_continues_another() -> None:
    assert shown(make_facts(prefix_facts(PREFIXES[1], NOW_S))) == page("""
    key        b41c77e0d92a1111111111111111111111111111111111111111111111111111
    namespace  default
    tokens     126,976 from the beginning
    continues  3f09ab52c1d70000000000000000000000000000000000000000000000000000
    adds       1,920 blocks, 3 checkpoints: 1.7 GiB disk
    kept       until it is evicted
    last use   2d 7h ago
    hits       1
    """)


def test_a_lookup_that_stops_short_and_loads() -> None:
    assert shown(make_facts(lookup_facts(LOOKUP))) == page("""
    prompt       131,072 tokens
    known        126,976 tokens, by their blocks
    resumes      at 122,880, after 93% of the prompt
    computes     8,192 tokens
    why no more  blocks are known further, but no checkpoint of the recurrent state [NO_CHECKPOINT]
    checkpoint   at 122,880, disk tier
    costs        loading takes 610 ms, computing 1m 37s: it is loaded
    key          b41c77e0d92a1111111111111111111111111111111111111111111111111111
    """)


def test_where_a_resumed_prefix_comes_from() -> None:
    assert shown(lookup_table(LOOKUP.tiers)) == page("""
    from      tokens      bytes     load
    ────────────────────────────────────
    device     4,096   90.0 MiB        -
    disk     118,784    1.0 GiB   610 ms
    """)


def test_a_lookup_that_had_better_compute() -> None:
    found = pb.LookupPrefixResponse()
    found.CopyFrom(LOOKUP)
    found.gate, found.load_s, found.compute_s = pb.GATE_DECISION_COMPUTE, 3.5, 2.0
    found.stop_reason, found.stop = "RECOMPUTE", "computing it is faster than loading it"
    assert shown(make_facts(lookup_facts(found))) == page("""
    prompt       131,072 tokens
    known        126,976 tokens, by their blocks
    resumes      at 122,880, after 93% of the prompt
    computes     8,192 tokens
    why no more  computing it is faster than loading it [RECOMPUTE]
    checkpoint   at 122,880, disk tier
    costs        loading takes 3.5 s, computing 2.0 s: it is computed again
    key          b41c77e0d92a1111111111111111111111111111111111111111111111111111
    """)


def test_a_lookup_with_all_on_the_device() -> None:
    found = pb.LookupPrefixResponse(
        prompt_tokens=2049, matched_tokens=2048, resume_tokens=2048, key=OTHER, compute_s=1.9,
        gate=pb.GATE_DECISION_NOTHING, stop_reason='WHOLE', stop='every grid position below the end is cached',
    )  # fmt: skip
    assert shown(make_facts(lookup_facts(found))) == page("""
    prompt       2,049 tokens
    known        2,048 tokens, by their blocks
    resumes      at 2,048, after 99% of the prompt
    computes     1 token
    why no more  every grid position below the end is cached [WHOLE]
    saves        1.9 s of computing; nothing has to be loaded
    key          77d0e1f2a3b42222222222222222222222222222222222222222222222222222
    """)


def test_a_lookup_that_finds_nothing() -> None:
    found = pb.LookupPrefixResponse(
        prompt_tokens=1,
        gate=pb.GATE_DECISION_NOTHING,
        stop_reason="SHORT",
        stop="the prompt has no grid position inside",
    )
    assert shown(make_facts(lookup_facts(found))) == page("""
    prompt       1 token
    known        0 tokens, by their blocks
    resumes      nowhere: all of it is computed
    computes     1 token
    why no more  the prompt has no grid position inside [SHORT]
    """)


def test_a_receipt_is_a_line_a_prompt() -> None:
    names = ["handbook.txt", "[draft] notes.md"]
    assert shown(receipt_table(RECEIPT, names)) == page("""
    prompt            key            tokens  cached before   device      host     disk  durable  kept
    ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
    handbook.txt      b41c77e0d92a  126,976          4,096  2.0 GiB         -  1.7 GiB  yes      pinned for 7d 0h
    [draft] notes.md  77d0e1f2a3b4    1,024          1,024        -  23.0 MiB        -  -        -
    """)


def test_tiers_are_a_line_each() -> None:
    assert shown(tier_table([DEVICE, DISK])) == page("""
    tier    state       capacity     held     cached      free    pinned     dirty           blocks  slots  hit  evicted
    ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
    device  ok           8.0 GiB  3.0 GiB    4.9 GiB  64.0 MiB         -         -      5,755/5,800   6/66  81%       88
    disk    read-only  200.0 GiB      0 B  154.0 GiB  46.0 GiB  12.0 GiB  96.0 MiB  110,000/142,000      -  90%    5,120
    """)


def test_a_tier_in_trouble_in_full() -> None:
    assert shown(make_facts(tier_facts(DISK))) == page("""
    tier       disk (ext4, direct I/O)
    state      read-only: no space is left on the device
    capacity   200.0 GiB
    held       0 B
    cached     154.0 GiB, 12.0 GiB of it pinned
    free       46.0 GiB
    blocks     142,000, 110,000 cached, 32,000 free
    taken      156.0 GiB of at most 200.0 GiB
    hits       9,300,416 tokens, 90% of 10,348,992 looked up; 12 not loaded, computing was faster
    read       61.0 GiB in 41,233 operations, 2.24 ms each
    written    160.0 GiB in 110,000 operations, 4.65 ms each
    unwritten  96.0 MiB waiting, 31 writes dropped
    evicted    5,120 blocks
    damage     2 records did not check, 1 set aside now
    """)


def test_a_tier_on_unified_memory_in_full() -> None:
    host = admin_pb2.Tier()
    host.CopyFrom(DEVICE)
    host.name, host.is_unified, host.driver_free_bytes = "host", True, 10 * GIB
    assert shown(make_facts(tier_facts(host))) == page("""
    tier         host (cpu)
    state        ok
    capacity     8.0 GiB
    held         3.0 GiB
    cached       4.9 GiB, 0 B of it pinned
    free         64.0 MiB
    blocks       5,800, 3,600 cached, 45 free
    slots        66, 60 free
    memory       shared with the tier before it, counted once
    driver free  10.0 GiB
    host free    11.0 GiB
    hits         44,040,192 tokens, 81% of 54,389,184 looked up
    read         nothing
    written      nothing
    unwritten    0 B waiting, 0 writes dropped
    evicted      88 blocks
    damage       0 records did not check, 0 set aside now
    """)


def test_rates_are_columns_that_compare() -> None:
    before = admin_pb2.Tier()
    before.CopyFrom(DISK)
    before.reads -= 200
    before.read_bytes -= 300 * MIB
    before.read_s -= 0.9
    before.hit_tokens -= 13_000
    before.dropped_writes -= 3
    before.evicted_blocks -= 4
    lines = [stat_line(tier_rates(before, DISK, 2.0)), stat_line(tier_rates(DEVICE, DEVICE, 2.0))]
    assert "\n".join([stat_header(), *lines]) == page("""
    tier     state          read/s  read lat    write/s write lat      dirty     cached hit tok/s evict/s drop/s gated/s
    disk     read-only   150.0 MiB   4.50 ms          -         -   96.0 MiB  154.0 GiB     6,500     2.0    1.5       -
    device   ok                  -         -          -         -          -    4.9 GiB         -       -      -       -
    """)


def test_quotas_stand_beside_their_use() -> None:
    quotas = (
        admin_pb2.Quota(namespace='default', used_cached_bytes=160 * GIB),
        admin_pb2.Quota(
            namespace='team-a', cached_bytes=10 * GIB, pinned_bytes=GIB, used_cached_bytes=9 * GIB,
            used_pinned_bytes=GIB // 2, durable=True,
        ),
    )  # fmt: skip
    assert shown(quota_table(quotas)) == page("""
    namespace      cached   of at most   used      pinned   of at most   used   at restart
    ──────────────────────────────────────────────────────────────────────────────────────
    default     160.0 GiB     no limit      -         0 B     no limit      -   -
    team-a        9.0 GiB     10.0 GiB    90%   512.0 MiB      1.0 GiB    50%   kept
    """)


def test_counters_that_went_back_began_anew() -> None:
    restarted = admin_pb2.Tier(name="disk", read_bytes=10 * MIB, reads=5, read_s=0.1)
    rates = tier_rates(DISK, restarted, 2.0)
    assert rates.read_bytes_per_s == 5 * MIB
    assert rates.read_latency_s == pytest.approx(0.02)
    assert rates.dropped_writes_per_s == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.9, "59s"), (60, "1m 0s"), (3599, "59m 59s"), (3600, "1h 0m"), (90_000, "1d 1h"), (1e8, "3y")],
)
def test_an_age_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert brief_seconds(seconds) == text


def test_a_count_agrees_with_its_noun() -> None:
    assert [counted(1, "prefix", "prefixes"), counted(1200, "prefix", "prefixes")] == ["1 prefix", "1,200 prefixes"]
    assert counted(0, "block") == "0 blocks"


def test_times_and_sizes_are_read_as_people_type_them() -> None:
    assert [parse_seconds(text, "--ttl") for text in ("90", "90s", "1.5h", "7d")] == [90, 90, 5400, 604_800]
    sizes = [parse_bytes(text, "--cached") for text in ("4096", "1k", "512MiB", "1.5g", "2 TB", "7b")]
    assert sizes == [4096, 1024, 512 * MIB, 3 * GIB // 2, 2 << 40, 7]
    for text in ("", "x", "-1", "1y", "1e3", "nan", "inf", "1 h 2"):
        with pytest.raises(CliError, match="--ttl"):
            parse_seconds(text, "--ttl")
    for text in ("", "GiB", "-1g", "1x", "nan", "1.2.3g"):
        with pytest.raises(CliError, match="--cached"):
            parse_bytes(text, "--cached")
