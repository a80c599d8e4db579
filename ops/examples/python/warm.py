"""Warms prompts from files into the disk tier: `python warm.py KEY FILE...`. Prints the receipt, one prefix a line.

A job's key makes it safe to repeat: the same call joins the job while it runs, and gets its receipt once it is done.
The daemon is DOWNCORE_SERVER (unix:PATH or HOST:PORT).
"""

import os
import sys
from pathlib import Path

import grpc
from downcore.v1 import cache_pb2, cache_pb2_grpc

LIFETIME_S = 26 * 3600.0  # for a job that comes once a day


def main() -> int:
    """One job, from its call to its receipt."""
    if len(sys.argv) < 3:
        print(f"usage: {Path(sys.argv[0]).name} KEY FILE...", file=sys.stderr)
        return 2
    key, *names = sys.argv[1:]
    request = cache_pb2.WarmPrefixRequest(
        key=key,
        prompts=[cache_pb2.Prompt(text=Path(name).read_text(encoding="utf-8")) for name in names],
        tier=cache_pb2.CACHE_TIER_DISK,
        durable=True,  # no receipt before it would survive a power cut
        pin=True,
        ttl_s=LIFETIME_S,
        detached=True,  # goes on where this program is interrupted
    )
    target = os.environ.get("DOWNCORE_SERVER") or sys.exit("set DOWNCORE_SERVER to unix:PATH or HOST:PORT")
    try:
        with grpc.insecure_channel(target) as channel:
            receipt = follow(cache_pb2_grpc.CacheServiceStub(channel), request)
    except grpc.RpcError as error:
        print(f"{error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    for name, prefix in zip(names, receipt.prefixes, strict=True):
        where = "durable" if prefix.durable else "not durable"
        print(f"{name}: {prefix.tokens} tokens, {prefix.cached_tokens} of them cached before, {where}, {prefix.key}")
    if receipt.is_repeated:
        print("done before; this is the receipt of then", file=sys.stderr)
    return 0


def follow(stub: cache_pb2_grpc.CacheServiceStub, request: cache_pb2.WarmPrefixRequest) -> cache_pb2.WarmReceipt:
    """The receipt, and progress on stderr on the way to it."""
    for response in stub.WarmPrefix(request):
        match response.WhichOneof("event"):
            case "progress":
                progress = response.progress
                stage = cache_pb2.WarmStage.Name(progress.stage).removeprefix("WARM_STAGE_").lower()
                done = f"{progress.done_tokens}/{progress.total_tokens} tokens"
                print(f"prompt {progress.prompt_index}: {stage} {done}", file=sys.stderr)
            case "receipt":
                return response.receipt
            case _:
                pass
    raise AssertionError("a stream without an error ends with its receipt")


if __name__ == "__main__":
    sys.exit(main())
