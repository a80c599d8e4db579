"""The dashboard, the alerts and the page on observability, held against a scrape of a real daemon with all tiers."""

import json
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from downcore.v1 import admin_pb2
from downcore.v1 import generation_pb2 as pb

from daemon.errors import ErrorReason
from daemon.front.ended import End
from daemon.front.families import FAMILIES, Type, table
from daemon.messages import TierState
from tests.e2e.daemon import TINY_FLAGS, Daemon, running, tiny_model
from tests.front.harness import eventually
from tests.front.scraping import complaints, families, get, metrics_port, values
from tests.ops.commands import check_command, commands_in
from tiers.meters import EvictionReason, Kind

OPS = Path(__file__).parents[2] / "ops"
DASHBOARD: dict[str, Any] = json.loads((OPS / "grafana" / "downcore.json").read_text())
RULES: list[dict[str, Any]] = yaml.safe_load((OPS / "alerts" / "downcore.yaml").read_text())["groups"][0]["rules"]
PAGE = (OPS / "docs" / "observability.md").read_text()

NUM_PROMPTS = 12
SELECTOR = re.compile(r"((?:downcore_|vllm:)[a-z0-9_]+)(?:\{([^}]*)\})?(\[[^\]]+\])?")
MATCHER = re.compile(r'(\w+)\s*(=~|!=|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")
FROM_PROMETHEUS = {"instance", "le"}  # labels that a scrape does not make, or histograms alone
OVER_TIME = re.compile(r"\b(rate|increase|deriv)\s*\(\s*$")
VALUES = {
    "tier": {"device", "host", "disk", "none"},
    "state": {*TierState, "queued", "restoring", "prefilling", "decoding", "preempted"},
    "kind": set(Kind),
    "reason": {*EvictionReason, *ErrorReason},
    "end": set(End),
    "process": {"front", "engine", "tokenizers"},
}


def expressions() -> Iterator[str]:
    """All PromQL there is, Grafana's variables as they would be filled in."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"].replace("$__rate_interval", "5m").replace("$__range", "3h").replace("$instance", ".*")
    for rule in RULES:
        yield rule["expr"]


def family_of(name: str) -> str:
    """The family that a selector's name is of."""
    for end in ("_bucket", "_sum", "_count"):
        base = name.removesuffix(end)
        if base != name and base in FAMILIES and FAMILIES[base].type is Type.HISTOGRAM:
            return base
    return name


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Generator[bytes]:
    """Of a daemon whose device is too small for what it is asked, with a host and a disk tier below."""
    folder = tmp_path_factory.mktemp("daemon")
    flags = (
        *TINY_FLAGS, "--pool-bytes", str(512 << 10), "--host-bytes", str(256 << 10), "--break-even", "false",
        "--disk-path", str(folder / "tier"), "--disk-bytes", str(256 << 20), "--metrics-tcp", "127.0.0.1:0",
    )  # fmt: skip
    with running(folder, tiny_model(folder / "model"), *flags) as daemon:
        port = metrics_port(daemon.log.read_text().splitlines())
        for salt in (*range(NUM_PROMPTS), 0, 1):
            ids = [1 + (i * i + 7 * salt) % 250 for i in range(300)]
            stopping = pb.StoppingParams(max_tokens=4, ignore_eos=True)
            daemon.generate(token_ids=pb.TokenIds(ids=ids), stopping=stopping)
            wait_for_write_downs(daemon)
        body = b""

        def is_settled() -> bool:
            nonlocal body
            body = get(port, "/metrics").body
            return values(body, "downcore_sequences") == 0

        eventually(is_settled)
        yield body


def wait_for_write_downs(daemon: Daemon) -> None:
    """So that what the device forgets is below it."""
    request = admin_pb2.ListTiersRequest()
    eventually(lambda: all(not tier.dirty_bytes for tier in daemon.admin.ListTiers(request, timeout=10).tiers))


def test_a_daemon_whose_device_is_too_small_reads_what_it_has_written(page: bytes) -> None:
    assert complaints(page) == []
    assert values(page, "downcore_tier_evictions_total", tier="device", kind="block", reason="room") > 0
    assert values(page, "downcore_tier_written_bytes_total", tier="disk") > 0
    below = values(page, "downcore_tier_read_bytes_total")
    assert below > 0, "a tier that is written and never read"
    assert values(page, "downcore_tier_read_seconds_count") == values(page, "downcore_tier_stall_seconds_count") > 0
    assert values(page, "downcore_unbalanced_proofs_total") == 0
    assert values(page, "downcore_step_seconds_count") > NUM_PROMPTS


def test_the_engines_account_of_prompt_tokens_is_the_fronts(page: bytes) -> None:
    for tier in ("device", "host", "disk"):
        by_front = values(page, "downcore_prompt_tokens_total", source=tier)
        assert values(page, "downcore_tier_hit_tokens_total", tier=tier) == by_front
    computed = values(page, "downcore_prompt_tokens_total", source="computed")
    assert values(page, "downcore_tier_miss_tokens_total", tier="disk") == computed
    assert values(page, "downcore_prompt_tokens_total") == (NUM_PROMPTS + 2) * 300
    assert values(page, "vllm:prompt_tokens_total") == (NUM_PROMPTS + 2) * 300
    assert values(page, "vllm:generation_tokens_total") == (NUM_PROMPTS + 2) * 4


def test_every_metric_and_label_that_dashboard_and_alerts_name_is_in_the_scrape(page: bytes) -> None:
    found = families(page)
    named: set[str] = set()
    for expression in expressions():
        labels: set[str] = set()
        for match in SELECTOR.finditer(expression):
            name, matchers, is_range = family_of(match[1]), MATCHER.findall(match[2] or ""), match[3]
            assert name in found, f"{match[1]} is in no scrape: {expression}"
            named.add(name)
            of_family = {*FAMILIES[name].labels, *FROM_PROMETHEUS}
            labels |= of_family
            for label, operator, value in matchers:
                assert label in of_family, f"{match[1]} has no label {label}"
                assert label not in VALUES or operator == "=~" or value in VALUES[label], f"{label} is never {value}"
            is_counter = FAMILIES[name].type is not Type.GAUGE
            is_over_time = OVER_TIME.search(expression[: match.start()]) is not None
            assert bool(is_range) == is_over_time, expression
            assert is_over_time or not is_counter or "unbalanced" in name, f"a counter as it stands: {expression}"
        for group in GROUPING.findall(expression):
            grouped = {label.strip() for label in group.split(",")}
            assert grouped <= labels, f"none of its metrics has {grouped - labels}: {expression}"
        for opening, closing in ("()", "{}", "[]"):
            assert expression.count(opening) == expression.count(closing), expression
    assert len(named) > 35


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies on another panel"
        assert all(x < 24 for x, _ in cells)
        taken |= cells
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "instance"}


def test_alerts_are_whole_and_the_page_says_what_to_do_about_each() -> None:
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        assert f"\n| {rule['alert']} | " in PAGE, "the page does not say what to do"
    assert len({rule["alert"] for rule in RULES}) == len(RULES) >= 12


def test_the_pages_table_is_the_catalogue() -> None:
    begin, end = "<!-- families: python -m daemon.front.families -->\n", "\n<!-- end of families -->"
    assert PAGE.partition(begin)[2].partition(end)[0] == table(), "run python -m daemon.front.families"


def test_the_pages_commands_are_understood() -> None:
    commands = list(commands_in(PAGE))
    assert len(commands) >= 3
    for command in commands:
        check_command(command)
