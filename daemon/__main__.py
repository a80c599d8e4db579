"""The daemon: `python -m daemon --model PATH`. This process is the front; it spawns the engine."""

import logging
import os
import sys

import msgspec
import uvloop

from daemon import logs, memory
from daemon.front import grpc_mend, processor
from daemon.front.command_line import Action, Command, read
from daemon.front.config import FrontConfig
from daemon.front.server import serve
from daemon.front.settings import SettingsError
from daemon.front.sockets import ListenError
from daemon.front.supervisor import EngineFailed
from daemon.front.tokenizer_pool import TokenizerFailed


def main() -> int:
    """Exit status: 0 after an orderly end, 1 where it cannot serve, 2 for wrong settings."""
    try:
        command = read(sys.argv[1:], os.environ)
        if command.action is not Action.SERVE:
            return _tell(command)
        config = command.config()
    except SettingsError as error:
        print(f"downcored: {error}", file=sys.stderr)
        return 2
    if not os.path.isdir(config.engine.model_path):
        print(f"downcored: there is no model folder {config.engine.model_path!r}", file=sys.stderr)
        return 2
    return run(config)


def _tell(command: Command) -> int:
    """Shows or checks the settings instead of serving with them."""
    if command.action is Action.SHOW:
        print(msgspec.json.format(msgspec.json.encode(command.rows())).decode())
        return 0
    problems = command.check()
    for problem in problems:
        print(f"downcored: {problem}", file=sys.stderr)
    return 2 if problems else 0


def run(config: FrontConfig) -> int:
    """Serves until a signal. Returns: the exit status."""
    logs.configure("front", level=config.log_level, log_format=config.log_format, tells_errors=False)
    if not memory.bound_allocator():
        logging.getLogger("downcore.front").warning("this C library has no mallopt: resident memory may creep")
    if config.one_processor:
        processor.keep_to_one()
    grpc_mend.quiet_core()
    grpc_mend.apply()
    try:
        return uvloop.run(serve(config))
    except (EngineFailed, ListenError, TokenizerFailed) as error:
        print(f"downcored: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
