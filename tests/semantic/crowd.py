"""Questions that are answered in one batch with others, provably: a stream decodes from before the first question is
asked until after the last is answered."""

import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from downcore.v1 import generation_pb2 as pb

from tests.e2e.daemon import Daemon
from tests.semantic.needles import TIMEOUT_S, Answer, Question, ask

STREAM_TOKENS = 100_000  # longer than any set of questions takes


class _Stream:
    """A request that decodes until it is cancelled."""

    def __init__(self, daemon: Daemon) -> None:
        request = pb.GenerateRequest(
            text="The history of the package manager",
            sampling=pb.SamplingParams(seed=0, temperature=0.7, top_k=40),
            stopping=pb.StoppingParams(max_tokens=STREAM_TOKENS, ignore_eos=True),
        )
        self.call = daemon.generation.Generate(request, timeout=TIMEOUT_S)
        self.num_tokens = 0
        self.decoding = threading.Event()
        self.ended = threading.Event()
        self.error: grpc.StatusCode | None = None
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def close(self) -> None:
        self.call.cancel()
        self._reader.join(60)
        assert not self._reader.is_alive()
        assert self.error is grpc.StatusCode.CANCELLED, self.error

    def _read(self) -> None:
        try:
            for response in self.call:
                if response.HasField("chunk"):
                    self.num_tokens += len(response.chunk.token_ids)
                    self.decoding.set()
        except grpc.RpcError as error:
            self.error = error.code() if isinstance(error, grpc.Call) else None
        self.ended.set()


@contextmanager
def decoding_beside(daemon: Daemon) -> Generator[None]:
    """Another sequence decodes, making progress, all the time that the body takes."""
    stream = _Stream(daemon)
    try:
        assert stream.decoding.wait(60)
        before = stream.num_tokens
        yield
        assert not stream.ended.is_set(), "the stream ended before the questions did"
        assert stream.num_tokens > before
    finally:
        stream.close()


def ask_all_at_once(daemon: Daemon, questions: list[Question]) -> list[Answer]:
    """Puts all questions together; the answers in their order."""
    with ThreadPoolExecutor(max_workers=len(questions)) as workers:
        return list(workers.map(lambda question: ask(daemon, question.messages), questions))
