"""The engine process: `python -m daemon.engine --fd N`, spawned by the front with one end of a socket pair.

The first message says what to load. After Ready the loop turns until Shutdown, or until the front is gone.
"""

import argparse
import logging
import os
import socket
import sys
import time

import torch

from daemon import logs, memory
from daemon.engine.answers import words_of
from daemon.engine.engine import Engine
from daemon.engine.faults import DeviceFault, end_if_sticky
from daemon.engine.leaving import write_down
from daemon.engine.link import FrontGone, Link
from daemon.engine.resting import may_sleep, rest
from daemon.engine.start import StartError, start
from daemon.engine.watch import TierWatch
from daemon.messages import Configure, LoadFailed, Loading, Pulse, Ready

PULSE_S = 0.25  # the step clock: sent this often at least, and while idle the longest sleep
TRIM_AFTER_S = 1.0  # of rest: the next forward takes new pages, which is not worth it between two requests of a burst

log = logging.getLogger("downcore.engine")


def main() -> int:
    """Exit status: 0 after Shutdown, 1 where it could not start, 3 where the front went away, 4 where it failed, or the
    device is lost.
    """
    parser = argparse.ArgumentParser(prog="python -m daemon.engine", description="Spawned by the front; not by hand.")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the front")
    logs.configure("engine", level="info", log_format="auto")
    link = Link(socket.socket(fileno=parser.parse_args().fd))
    try:
        engine = _load(link)
        if engine is None:
            return 1
        with torch.inference_mode():
            _loop(engine, link)
    except DeviceFault as fault:
        log.critical("the engine ends: %s", fault)
        return 4
    except FrontGone as gone:
        log.warning("the front is gone (%s)", gone)
        return 3
    except Exception:
        log.exception("the engine has failed")
        return 4
    return 0


def _load(link: Link) -> Engine | None:
    messages = link.receive(timeout_s=60.0)
    if not messages or not isinstance(messages[0], Configure):
        raise FrontGone("no configuration came")
    logs.configure("engine", level="info", log_format=messages[0].log_format)
    reported = 0.0

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal reported
        now = time.monotonic()
        if now - reported >= PULSE_S or done_bytes == total_bytes:
            reported = now
            link.send(Loading(done_bytes, total_bytes))

    try:
        engine, info = start(messages[0].config, send=link.send, progress=progress)
    except StartError as error:
        log.error("cannot start: %s", error)
        link.send(LoadFailed(str(error)))
        return None
    memory.settle()  # a step's garbage is looked through without what lives on
    link.send(Ready(info))
    for message in messages[1:]:
        engine.handle(message)
    return engine


def _loop(engine: Engine, link: Link) -> None:
    watch = TierWatch(engine.cache, link.send, time.monotonic())
    pulse_due = 0.0
    is_proven = False
    trim_due: float | None = None
    while not engine.is_stopping:
        messages = link.receive(PULSE_S if may_sleep(engine) else 0.0, engine.cache.mover)
        for message in messages:
            engine.handle(message)
        if engine.has_work:
            has_rows = not engine.only_waits
            began = time.perf_counter()
            try:
                engine.step()
            except RuntimeError as error:
                end_if_sticky(error, engine.pools.blocks.device)
                raise
            if has_rows or engine.scheduler.running:
                engine.scheduler.meters.step_s.observe(time.perf_counter() - began)
            is_proven, trim_due = False, time.monotonic() + TRIM_AFTER_S
        elif not messages and engine.tuning is not None and engine.tuning.num_waiting:
            rest(engine)
        elif not messages and not is_proven:
            _prove(engine)
            is_proven = True
        now = time.monotonic()
        if trim_due is not None and now >= trim_due and not engine.has_work:
            memory.trim()
            trim_due = None
        if now >= pulse_due:
            pulse_due = now + PULSE_S
            engine.keep_time()
            watch.poll(now)
            link.send(Pulse(engine.steps, len(engine.scheduler.waiting), engine.scheduler.num_running))
    write_down(engine, lambda: link.receive(PULSE_S, engine.cache.mover))
    engine.close()
    _prove(engine)
    deadline = time.monotonic() + 5.0
    while link.has_unsent and time.monotonic() < deadline:
        link.receive(timeout_s=0.1)


def _prove(engine: Engine) -> None:
    """The idle proof, once for every time the work ends: free + cached + held = pool, or what is astray by name."""
    try:
        engine.check()
    except AssertionError as error:
        engine.scheduler.meters.unbalanced_proofs += 1
        log.error("idle, and the books do not balance: %s", words_of(error))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # interpreter teardown with native threads has nothing left to save
