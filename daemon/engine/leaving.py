"""The engine's last work: what the disk tier lacks is written down before the process ends, within a window."""

import logging
import time
from collections.abc import Callable

from daemon.engine.engine import Engine

log = logging.getLogger("downcore.engine")


def write_down(engine: Engine, wait: Callable[[], object]) -> None:
    """Returns when everything is on disk, when the rest cannot be written, or when the window of the settings is over.

    Nothing is lost by what stays: it is computed again. The log says how much that is.

    Args:
        wait: sleeps until a transfer may have ended, a fraction of a second at the most.
    """
    cache, window_s = engine.cache, engine.config.flush_window_s
    num_lacking = engine.prefixes.offer_unwritten() if cache.disk is not None else 0
    if cache.disk is None or not (num_lacking or _is_recording(engine)):
        return
    began = time.monotonic()
    num_writes, num_bytes = cache.written()
    while (num_lacking or _is_recording(engine)) and cache.disk.takes_writes and time.monotonic() - began < window_s:
        cache.poll(engine.clock(), engine.unix_clock(), is_busy=False)
        if cache.writedown.is_idle and not _is_recording(engine):
            before, num_lacking = num_lacking, engine.prefixes.offer_unwritten()
            if num_lacking >= before:
                break  # their bytes are nowhere to be had any more
        else:
            wait()
    writes, written = cache.written()
    log.info(
        "written down at the end: %d records, %d bytes in %.1f s; %d prefixes stay unwritten",
        writes - num_writes,
        written - num_bytes,
        time.monotonic() - began,
        num_lacking,
    )


def _is_recording(engine: Engine) -> bool:
    """Chunks of prompts that were larger than the device are on their way to the disk."""
    return engine.cache.recorder is not None and not engine.cache.recorder.is_idle
