"""Request traces: what was asked when, as hashes of blocks.

Two formats. A session file of kv-cache-tester is one JSON object with nested requests and 64-token blocks, whose hashes
mean something within the file only. A Mooncake trace (FAST 2025) is one JSON object a line with 512-token blocks. In
both a hash names a block together with everything before it.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOONCAKE_BLOCK_TOKENS = 512


class TraceError(Exception):
    """A file is not a trace."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One prompt: when it came, how long it was, and the hashes of its whole blocks."""

    time_s: float
    num_tokens: int
    block_tokens: int
    scope: str  # of the hashes; the same hash in another scope is another block
    hashes: tuple[int, ...]

    def grid_keys(self, grid: int) -> tuple[tuple[str, int], ...]:
        """One key for each whole grid chunk: scope and hash of its last block."""
        step = grid // self.block_tokens
        ends = range(step - 1, min(self.num_tokens // grid * step, len(self.hashes)), step)
        return tuple((self.scope, self.hashes[end]) for end in ends)


def read_traces(paths: Sequence[Path], advance: Callable[[str], None] = lambda _: None) -> list[TracedRequest]:
    """All requests of files and of folders' files, interleaved by their time from each trace's start.

    Args:
        advance: told the name of every file that was read.

    Raises:
        TraceError: a file cannot be read, or is in neither format.
    """
    files = trace_files(paths)
    requests: list[TracedRequest] = []
    for path in files:
        try:
            requests += _read_file(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path} is not a trace: {error!r}") from error
        advance(path.name)
    return sorted(requests, key=lambda request: request.time_s)


def trace_files(paths: Sequence[Path]) -> list[Path]:
    """Files as they are, folders as the traces in them.

    Raises:
        TraceError: there is nothing.
    """
    files: list[Path] = []
    for path in paths:
        found = sorted(p for p in path.glob("**/*") if p.suffix in (".json", ".jsonl")) if path.is_dir() else [path]
        if not found or not all(file.is_file() for file in found):
            raise TraceError(f"no trace at {path}")
        files += found
    return files


def _read_file(path: Path) -> list[TracedRequest]:
    with path.open(encoding="utf-8") as file:
        if path.suffix == ".jsonl":
            return [_mooncake(json.loads(line), path.stem) for line in file if line.strip()]
        session = json.load(file)
    return [_of_session(entry, session["block_size"], path.stem) for entry in _leaves(session["requests"])]


def _leaves(entries: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Requests, those of sub-agents too, whose times count from the session's start like all others."""
    for entry in entries:
        if "requests" in entry:
            yield from _leaves(entry["requests"])
        else:
            yield entry


def _of_session(entry: dict[str, Any], block_tokens: int, scope: str) -> TracedRequest:
    return TracedRequest(float(entry["t"]), int(entry["in"]), block_tokens, scope, tuple(entry["hash_ids"]))


def _mooncake(entry: dict[str, Any], scope: str) -> TracedRequest:
    time_s, num_tokens = entry["timestamp"] / 1000, int(entry["input_length"])
    return TracedRequest(time_s, num_tokens, MOONCAKE_BLOCK_TOKENS, scope, tuple(entry["hash_ids"]))
