"""The page on the wire: its tables are what the code has, and its figures are the code's bounds."""

import re

from downcore.v1 import admin_pb2, cache_pb2, generation_pb2

from daemon.errors import ErrorReason
from daemon.front.access import ACCESS
from daemon.front.config import FrontConfig
from daemon.front.listeners import (
    MAX_CONNECTION_AGE_S,
    MAX_METADATA_BYTES,
    MAX_REQUEST_BYTES,
    MAX_RESPONSE_BYTES,
    OPTIONS,
)
from daemon.front.requests import MAX_BUFFERED_BYTES
from daemon.front.status import CODES, RETRY_S
from daemon.front.validate import MAX_CHAT_MESSAGES, MAX_STOP_BYTES, MAX_STOPS, MAX_WARM_PROMPTS
from daemon.front.warm import MAX_JOBS
from tests.pages.blocks import ROOT

PAGE = (ROOT / "ops" / "docs" / "wire.md").read_text(encoding="utf-8")
DEFAULTS = dict(zip(FrontConfig.__struct_fields__[1:], FrontConfig.__struct_defaults__, strict=True))


def rows(header: str) -> list[list[str]]:
    """Cells of the table with this header, without marks of code."""
    lines = PAGE.partition(header)[2].splitlines()[2:]
    table = lines[: next(number for number, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in table]


def test_the_catalogue_of_errors_is_the_daemons() -> None:
    found = {reason: (code, after) for reason, code, after, _ in rows("| reason | code | again after |")}
    assert found == {
        reason.value: (CODES[reason].name, f"{RETRY_S[reason]:g} s" if reason in RETRY_S else "")
        for reason in ErrorReason
    }


def test_every_method_of_every_service_is_listed_with_its_scope() -> None:
    found = {service: (methods.split(", "), scope) for service, methods, scope in rows("| service | methods | scope |")}
    for module in (generation_pb2, cache_pb2, admin_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            methods, scope = found[service.full_name]
            assert methods == [method.name for method in service.methods]
            assert {ACCESS[service.full_name][name].scope for name in methods} == {scope}


def test_its_figures_are_the_codes_bounds() -> None:
    options = dict(OPTIONS)
    for said in (
        f"{MAX_REQUEST_BYTES >> 20} MiB",
        f"{MAX_RESPONSE_BYTES >> 20} MiB, Tokenize",
        f"{MAX_METADATA_BYTES >> 10} KiB",
        f"{DEFAULTS['max_prompt_bytes'] >> 20} MiB of UTF-8",
        f"{MAX_CHAT_MESSAGES:,} messages",
        f"{MAX_STOPS}, {MAX_STOP_BYTES} each",
        f"{DEFAULTS['max_held_bytes'] >> 20} MiB (`max_held_bytes`)",
        f"{DEFAULTS['max_open_requests']:,} (`max_open_requests`)",
        f"| {MAX_JOBS}, {MAX_WARM_PROMPTS} |",
        f"`stall_timeout_s` ({DEFAULTS['stall_timeout_s']:g} s), or lets {MAX_BUFFERED_BYTES >> 20} MiB pile up",
        f"pings after {options['grpc.keepalive_time_ms'] // 1000} s of silence and waits "
        f"{options['grpc.keepalive_timeout_ms'] // 1000} s",
        f"more often than every {options['grpc.http2.min_ping_interval_without_data_ms'] // 1000} s",
        f"within {(options['grpc.keepalive_time_ms'] + options['grpc.keepalive_timeout_ms']) // 1000} s",
    ):
        assert said in re.sub(r"\s+", " ", PAGE), said
    assert MAX_CONNECTION_AGE_S == 3600
