"""How prefixes, look-ups and receipts look to people."""

from collections.abc import Iterable, Sequence

from downcore.v1 import cache_pb2
from rich.table import Table

from ops.cli.cache_options import SHORT_KEY_DIGITS, tier_name
from ops.cli.output import brief_seconds, counted, human_bytes, human_seconds, make_table, make_wide_table


def prefix_table(prefixes: Iterable[cache_pb2.Prefix], now_s: float) -> Table:
    """One row a prefix. Tokens are from the beginning; blocks and bytes those past the prefix that it continues."""
    numeric = ("tokens", "blocks", "device", "host", "disk", "hits", "last use")
    table = make_wide_table(("key", "continues", *numeric, "kept"), numeric=numeric)
    for prefix in prefixes:
        table.add_row(
            short_key(prefix.key),
            short_key(prefix.parent_key) or "-",
            f"{prefix.tokens:,}",
            f"{prefix.blocks:,}",
            *tier_sizes(prefix.bytes),
            f"{prefix.hits:,}",
            ago(prefix.last_use_time_s, now_s),
            kept(prefix, now_s),
        )
    return table


def prefix_facts(prefix: cache_pb2.Prefix, now_s: float) -> list[tuple[str, str]]:
    """One prefix in full."""
    checkpoints = counted(prefix.checkpoints, "checkpoint")
    return [
        ("key", prefix.key),
        ("namespace", prefix.namespace),
        ("tokens", f"{prefix.tokens:,} from the beginning"),
        ("continues", prefix.parent_key or "no other prefix"),
        ("adds", f"{counted(prefix.blocks, 'block')}, {checkpoints}: {described_bytes(prefix.bytes)}"),
        ("kept", kept(prefix, now_s, otherwise="until it is evicted")),
        ("last use", f"{ago(prefix.last_use_time_s, now_s)} ago"),
        ("hits", f"{prefix.hits:,}"),
    ]


def lookup_facts(found: cache_pb2.LookupPrefixResponse) -> list[tuple[str, str]]:
    """What a prompt would find, in the order in which it matters."""
    resumes = "nowhere: all of it is computed"
    if found.resume_tokens:
        percent = 100 * found.resume_tokens // max(found.prompt_tokens, 1)
        resumes = f"at {found.resume_tokens:,}, after {percent}% of the prompt"
    facts = [
        ("prompt", counted(found.prompt_tokens, "token")),
        ("known", f"{counted(found.matched_tokens, 'token')}, by their blocks"),
        ("resumes", resumes),
        ("computes", counted(found.prompt_tokens - found.resume_tokens, "token")),
        ("why no more", f"{found.stop} [{found.stop_reason}]"),
    ]
    if found.HasField("checkpoint"):
        place = found.checkpoint
        facts.append(("checkpoint", f"at {place.position:,}, {tier_name(place.tier)} tier"))
    if found.gate == cache_pb2.GATE_DECISION_NOTHING and found.resume_tokens:
        facts.append(("saves", f"{human_seconds(found.compute_s)} of computing; nothing has to be loaded"))
    elif found.gate != cache_pb2.GATE_DECISION_NOTHING:
        costs = f"loading takes {human_seconds(found.load_s)}, computing {human_seconds(found.compute_s)}"
        verdict = "it is loaded" if found.gate == cache_pb2.GATE_DECISION_LOAD else "it is computed again"
        facts.append(("costs", f"{costs}: {verdict}"))
    return [*facts, ("key", found.key)] if found.key else facts


def lookup_table(tiers: Iterable[cache_pb2.LookupTier]) -> Table:
    """Where the resumed prefix would come from."""
    numeric = ("tokens", "bytes", "load")
    table = make_table(("from", *numeric), numeric=numeric)
    for row in tiers:
        load = human_seconds(row.load_s) if row.load_s else "-"
        table.add_row(tier_name(row.tier), f"{row.tokens:,}", human_bytes(row.bytes), load)
    return table


def receipt_table(receipt: cache_pb2.WarmReceipt, names: Sequence[str]) -> Table:
    """What became of each prompt; `names` in the order of the request."""
    numeric = ("tokens", "cached before", "device", "host", "disk")
    table = make_wide_table(("prompt", "key", *numeric, "durable", "kept"), numeric=numeric)
    for name, prefix in zip(names, receipt.prefixes, strict=True):
        table.add_row(
            name.replace("[", "\\["),
            short_key(prefix.key),
            f"{prefix.tokens:,}",
            f"{prefix.cached_tokens:,}",
            *tier_sizes(prefix.bytes),
            "yes" if prefix.durable else "-",
            kept(prefix, receipt.time_s),
        )
    return table


def short_key(key: str) -> str:
    return key[:SHORT_KEY_DIGITS]


def tier_sizes(found: cache_pb2.BytesByTier) -> list[str]:
    """Bytes in each tier; nothing is a dash."""
    return [human_bytes(size) if size else "-" for size in (found.device, found.host, found.disk)]


def described_bytes(found: cache_pb2.BytesByTier) -> str:
    """ "1.0 MiB device, 2.0 MiB disk"."""
    named = (("device", found.device), ("host", found.host), ("disk", found.disk))
    return ", ".join(f"{human_bytes(size)} {name}" for name, size in named if size) or "none"


def ago(time_s: float, now_s: float) -> str:
    """How long before `now_s` it was."""
    return brief_seconds(max(now_s - time_s, 0.0))


def kept(prefix: cache_pb2.Prefix | cache_pb2.WarmedPrefix, now_s: float, *, otherwise: str = "-") -> str:
    """How long it stays: "pinned", "pinned for 1h 0m", "for 1h 0m" (then it is forgotten), or nothing said."""
    time_left = brief_seconds(max(prefix.expires_time_s - now_s, 0.0) + 0.5)  # to the nearest second
    said = [
        *(["pinned"] if prefix.pinned else []),
        *([f"for {time_left}"] if prefix.HasField("expires_time_s") else []),
    ]
    return " ".join(said) or otherwise
