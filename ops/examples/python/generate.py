"""Streams one answer: `python generate.py PROMPT [MAX_TOKENS]`. Ctrl-C cancels it.

The daemon and the credentials are those of the command line: DOWNCORE_SERVER (unix:PATH or HOST:PORT), and where it
wants any, DOWNCORE_TOKEN_FILE, DOWNCORE_TLS_CA, DOWNCORE_TLS_CERT, DOWNCORE_TLS_KEY.
"""

import os
import sys
import time
from pathlib import Path

import grpc
from downcore.v1 import generation_pb2, generation_pb2_grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

Metadata = tuple[tuple[str, str], ...]

ATTEMPTS = 5
TIMEOUT_S = 600.0  # for the whole answer; the daemon drops what it cannot finish by then
# proto/downcore/v1/service_config.json, for the service that is called here: gRPC itself tries again where the daemon
# cannot be reached or is restarting, as long as no message has come.
SERVICE_CONFIG = """{"methodConfig": [{
  "name": [{"service": "downcore.v1.GenerationService"}],
  "retryPolicy": {"maxAttempts": 5, "initialBackoff": "0.2s", "maxBackoff": "5s", "backoffMultiplier": 2,
                  "retryableStatusCodes": ["UNAVAILABLE"]}
}]}"""
OPTIONS = (
    ("grpc.service_config", SERVICE_CONFIG),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


def main() -> int:
    """Asks once, and again where the daemon says when."""
    if len(sys.argv) not in (2, 3):
        print(f"usage: {Path(sys.argv[0]).name} PROMPT [MAX_TOKENS]", file=sys.stderr)
        return 2
    request = generation_pb2.GenerateRequest(
        text=sys.argv[1],
        sampling=generation_pb2.SamplingParams(temperature=0),
        stopping=generation_pb2.StoppingParams(max_tokens=int(sys.argv[2]) if len(sys.argv) == 3 else 64),
    )
    target = os.environ.get("DOWNCORE_SERVER") or sys.exit("set DOWNCORE_SERVER to unix:PATH or HOST:PORT")
    credentials = tls()
    metadata = token(is_safe=credentials is not None or is_local(target))
    channel = (
        grpc.insecure_channel(target, OPTIONS)
        if credentials is None
        else grpc.secure_channel(target, credentials, OPTIONS)
    )
    with channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for _ in range(ATTEMPTS):
            status, retry_s = ask(stub, request, metadata)
            if retry_s is None:
                return status
            time.sleep(retry_s)
    return 1


def ask(
    stub: generation_pb2_grpc.GenerationServiceStub, request: generation_pb2.GenerateRequest, metadata: Metadata
) -> tuple[int, float | None]:
    """One call. Returns: the exit status, and seconds after which trying again makes sense, None where it does not."""
    call = stub.Generate(request, timeout=TIMEOUT_S, metadata=metadata)
    has_begun = False
    try:
        for response in call:
            has_begun = True
            match response.WhichOneof("event"):
                case "chunk":
                    print(response.chunk.text, end="", flush=True)
                case "summary":
                    usage = response.summary.usage
                    cached = usage.cached_tokens.device + usage.cached_tokens.host + usage.cached_tokens.disk
                    print(flush=True)
                    print(
                        f"prompt {usage.prompt_tokens} tokens, {cached} from the cache; "
                        f"answer {usage.completion_tokens} tokens",
                        file=sys.stderr,
                    )
                case _:
                    pass  # `started`, `finished`, and what a later daemon may add
    except grpc.RpcError:
        reason, retry_s = details_of(call)
        again = f"; try again in {retry_s:g} s" if retry_s is not None else ""
        print(f"{call.code().name}: {call.details()} [{reason}]{again}", file=sys.stderr)
        return 1, None if has_begun else retry_s  # what has begun would be answered twice
    finally:
        call.cancel()  # after Ctrl-C, or any error of this program, the daemon does not go on; else it does nothing
    return 0, None


def details_of(call: grpc.Call) -> tuple[str, float | None]:
    """The daemon's reason, and the seconds of its RetryInfo."""
    reason, retry_s = "no reason", None
    status = rpc_status.from_call(call)
    for detail in status.details if status is not None else ():
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(retry):
            retry_s = retry.retry_delay.ToTimedelta().total_seconds()
    return reason, retry_s


def tls() -> grpc.ChannelCredentials | None:
    """TLS with the authority that is named, and the client's own certificate where there is one."""
    ca, certificate, key = (os.environ.get(f"DOWNCORE_TLS_{name}") for name in ("CA", "CERT", "KEY"))
    if ca is None:
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=Path(ca).read_bytes(),
        private_key=Path(key).read_bytes() if key else None,
        certificate_chain=Path(certificate).read_bytes() if certificate else None,
    )


def token(*, is_safe: bool) -> Metadata:
    """The metadata of a call. A token leaves this machine over TLS only."""
    path = os.environ.get("DOWNCORE_TOKEN_FILE")
    if path is None:
        return ()
    if not is_safe:
        sys.exit("a token leaves this machine over TLS only: set DOWNCORE_TLS_CA")
    return (("authorization", f"Bearer {Path(path).read_text().strip()}"),)


def is_local(target: str) -> bool:
    """Whether nothing leaves this machine on the way there."""
    return target.startswith(("unix:", "127.0.0.1:", "localhost:", "[::1]:"))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ncancelled", file=sys.stderr)
        sys.exit(130)
