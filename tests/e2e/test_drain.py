"""The end of a whole daemon: what its disk tier lacks is written down in time, and is found after a restart."""

import re
from pathlib import Path

from downcore.v1 import admin_pb2
from downcore.v1 import generation_pb2 as pb

from tests.e2e.daemon import TINY_FLAGS, Daemon, running, summary_of, tiny_model, tokens_of

NUM_PROMPTS = 4
PROMPT_TOKENS = 1000  # 960 of them in whole chunks: 60 blocks of 49,152 bytes
WIDE = 6  # times the keys and values of the usual tiny model, at about its cost
RATE = 1 << 20  # bytes a second: a third of what a prompt leaves. Most of it is unwritten at the last answer


def flags(folder: Path) -> tuple[str, ...]:
    disk = ("--disk-path", str(folder / "tier"), "--disk-bytes", str(256 << 20), "--break-even", "false")
    return (
        *TINY_FLAGS,
        "--pool-bytes",
        str(32 << 20),
        "--flush-window-s",
        "60",
        *disk,
        "--write-bytes-per-s",
        str(RATE),
    )


def serve(daemon: Daemon, salt: int) -> tuple[list[int], int]:
    """The answer, and how many of the prompt's tokens came from disk."""
    ids = pb.TokenIds(ids=[1 + (i * i + 7 * salt) % 250 for i in range(PROMPT_TOKENS)])
    responses = daemon.generate(
        token_ids=ids,
        sampling=pb.SamplingParams(temperature=0),
        stopping=pb.StoppingParams(max_tokens=2, ignore_eos=True),
    )
    return tokens_of(responses), summary_of(responses).usage.cached_tokens.disk


def test_after_a_drain_and_a_restart_every_prefix_is_a_hit_on_disk(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", head_dim=8 * WIDE)
    with running(tmp_path, model, *flags(tmp_path)) as daemon:
        answers = [serve(daemon, salt)[0] for salt in range(NUM_PROMPTS)]
        written = daemon.admin.ListTiers(admin_pb2.ListTiersRequest(), timeout=10).tiers[1].written_bytes
        drained = daemon.admin.Drain(admin_pb2.DrainRequest(timeout_s=5), timeout=10)
        assert drained.drained
    found = re.search(r"written down at the end: (\d+) records, (\d+) bytes .*; (\d+) prefixes", daemon.log.read_text())
    assert found is not None, "everything was written before the end: the test has shown nothing"
    records, num_bytes, unwritten = (int(number) for number in found.groups())
    assert records >= 60
    assert num_bytes > 0
    assert unwritten == 0
    print(f"written while serving: {written} bytes, at the end: {num_bytes} bytes, {records} records")
    with running(tmp_path, model, *flags(tmp_path)) as again:
        assert [serve(again, salt) for salt in range(NUM_PROMPTS)] == [(answer, 960) for answer in answers]
