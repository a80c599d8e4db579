"""downcore quota ls, set, rm: what a namespace may keep in the cache."""

from collections.abc import Iterable
from typing import Annotated

import typer
from downcore.v1 import admin_pb2
from rich.table import Table

from ops.cli.app import Format, FormatOption, ServerOption, TimeoutOption, make_app, run_app
from ops.cli.client import ADMIN, Client, connect
from ops.cli.confirm import DryRunOption, YesOption, confirm
from ops.cli.errors import CliError, ExitCode
from ops.cli.output import as_dict, human_bytes, make_console, make_table, print_data
from ops.cli.quantities import parse_bytes

app = make_app("What a namespace may keep in the cache, over all tiers.")
NameArgument = Annotated[str, typer.Argument(metavar="NAMESPACE")]


def run(arguments: list[str]) -> int:
    """The command."""
    return run_app(app, "quota", arguments)


@app.command("ls")
def list_quotas(
    server: ServerOption = None, timeout: TimeoutOption = 10.0, output: FormatOption = Format.TABLE
) -> None:
    """Namespaces that have a quota or bytes in the cache."""
    with connect(server) as client:
        quotas = _fetch(client, timeout)
    if output is not Format.TABLE:
        print_data([as_dict(quota) for quota in quotas], output)
    elif quotas:
        make_console().print(quota_table(quotas))
    else:
        make_console(stderr=True).print("no quotas, and nothing cached")


@app.command("set")
def set_quota(
    namespace: NameArgument,
    cached: Annotated[
        str | None, typer.Option("--cached", metavar="SIZE", help="Most of all its prefixes: 512MiB, 1.5g.")
    ] = None,
    pinned: Annotated[
        str | None, typer.Option("--pinned", metavar="SIZE", help="Most of its pinned prefixes: 512MiB, 1.5g.")
    ] = None,
    server: ServerOption = None,
    timeout: TimeoutOption = 10.0,
    output: FormatOption = Format.TABLE,
) -> None:
    """Limit a namespace, in place of any earlier limit. What is over it is evicted, but for pinned prefixes."""
    if cached is None and pinned is None:
        raise CliError(ExitCode.USAGE, "give --cached, --pinned or both; quota rm lifts a quota")
    request = admin_pb2.SetQuotaRequest(
        namespace=namespace,
        cached_bytes=parse_bytes(cached, "--cached") if cached is not None else None,
        pinned_bytes=parse_bytes(pinned, "--pinned") if pinned is not None else None,
    )
    with connect(server) as client:
        answer = client.unary(f"{ADMIN}/SetQuota", request, admin_pb2.SetQuotaResponse, timeout)
    if output is not Format.TABLE:
        print_data(as_dict(answer.quota), output)
    else:
        make_console().print(quota_table([answer.quota]))


@app.command("rm")
def remove_quota(
    namespace: NameArgument,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    server: ServerOption = None,
    timeout: TimeoutOption = 10.0,
    output: FormatOption = Format.TABLE,
) -> None:
    """Lift a namespace's quota. Asks first. Exits 6 when it has none."""
    if dry_run:
        with connect(server) as client:
            if not any(quota.namespace == namespace and _is_set(quota) for quota in _fetch(client, timeout)):
                raise CliError(ExitCode.NOT_FOUND, f"{namespace} has no quota")
        print(f"would lift the quota of {namespace}")
        return
    confirm(f"Lift the quota of {namespace}?", yes=yes)
    request = admin_pb2.RemoveQuotaRequest(namespace=namespace)
    with connect(server) as client:
        answer = client.unary(f"{ADMIN}/RemoveQuota", request, admin_pb2.RemoveQuotaResponse, timeout)
    if output is not Format.TABLE:
        print_data(as_dict(answer), output)
    else:
        print(f"{namespace} has no quota any more")


def quota_table(quotas: Iterable[admin_pb2.Quota]) -> Table:
    """Use beside limit; "at restart" says whether the daemon remembers the quota."""
    numeric = ("cached", "of at most", "used", "pinned", "of at most", "used")
    table = make_table(("namespace", *numeric, "at restart"), numeric=numeric)
    for quota in quotas:
        cached = quota.cached_bytes if quota.HasField("cached_bytes") else None
        pinned = quota.pinned_bytes if quota.HasField("pinned_bytes") else None
        table.add_row(
            quota.namespace,
            *_use(quota.used_cached_bytes, cached),
            *_use(quota.used_pinned_bytes, pinned),
            ("kept" if quota.durable else "lost") if _is_set(quota) else "-",
        )
    return table


def _fetch(client: Client, timeout_s: float) -> list[admin_pb2.Quota]:
    answer = client.unary(f"{ADMIN}/ListQuotas", admin_pb2.ListQuotasRequest(), admin_pb2.ListQuotasResponse, timeout_s)
    return list(answer.quotas)


def _is_set(quota: admin_pb2.Quota) -> bool:
    """Whether it limits anything, or only says what the namespace has."""
    return quota.HasField("cached_bytes") or quota.HasField("pinned_bytes")


def _use(used_bytes: int, limit_bytes: int | None) -> tuple[str, str, str]:
    if limit_bytes is None:
        return human_bytes(used_bytes), "no limit", "-"
    share = used_bytes / max(limit_bytes, 1)
    return human_bytes(used_bytes), human_bytes(limit_bytes), f"{share:.0%}" if share < 10 else "over 10x"
