"""The daemon: `python -m daemon --model PATH`. This process is the front; it spawns the engine."""

import logging
import sys

import uvloop

from daemon.front import grpc_mend, memory
from daemon.front.config import FrontConfig, parse_args
from daemon.front.server import serve
from daemon.front.sockets import ListenError
from daemon.front.supervisor import EngineFailed
from daemon.front.tokenizer_pool import TokenizerFailed


def main() -> int:
    """Exit status: 0 after an orderly end, 1 where it cannot serve, 2 for wrong flags."""
    return run(parse_args())


def run(config: FrontConfig) -> int:
    """Serves until a signal. Returns: the exit status."""
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    if not memory.bound_allocator():
        logging.getLogger("downcore.front").warning("this C library has no mallopt: resident memory may creep")
    grpc_mend.apply()
    try:
        return uvloop.run(serve(config))
    except (EngineFailed, ListenError, TokenizerFailed) as error:
        print(f"downcored: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
