"""The null engine: it admits at once, and answers each prompt with its own tokens, again and again.

A step makes one token of every answer that runs, in one message, as an engine's does. Steps come at a rate, or as fast
as the front reads. It holds nothing, and what it is asked it answers with nothing.
"""

import argparse
import json
import select
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from daemon import messages

PULSE_S = 0.25
NUM_BLOCKS = 1 << 20
RECEIVED_BYTES = 1 << 18  # at a time


@dataclass(slots=True)
class Answer:
    """One choice of a request."""

    submit: messages.Submit
    index: int
    prompt_ids: list[int]
    num_tokens: int = 0


@dataclass(slots=True)
class NullEngine:
    """Speaks daemon/messages.py over `sock`. `interval_s` is the time between two steps, at least."""

    sock: socket.socket
    interval_s: float
    received: bytearray = field(default_factory=bytearray)
    answers: list[Answer] = field(default_factory=list[Answer])
    steps: int = 0
    is_leaving: bool = False

    def run(self) -> int:
        """Exit status: 0 after Shutdown, 3 where the front went away."""
        next_step_s = next_pulse_s = 0.0
        while not self.is_leaving:
            wake_s = min(next_pulse_s, next_step_s) if self.answers else next_pulse_s
            if not self._receive(max(wake_s - time.monotonic(), 0.0)):
                return 3
            now_s = time.monotonic()
            if self.answers and now_s >= next_step_s:
                next_step_s = max(next_step_s + self.interval_s, now_s)
                self._step()
            if now_s >= next_pulse_s:
                next_pulse_s = now_s + PULSE_S
                self._send(messages.Pulse(self.steps, 0, len(self.answers)))
        return 0

    def _receive(self, timeout_s: float) -> bool:
        """Handles what has arrived; False at the end of the socket."""
        readable, _, _ = select.select([self.sock], [], [], timeout_s)
        if readable:
            data = self.sock.recv(RECEIVED_BYTES)
            if not data:
                return False
            self.received += data
        at = 0
        while len(self.received) - at >= messages.HEADER.size:
            (size,) = messages.HEADER.unpack_from(self.received, at)
            begin = at + messages.HEADER.size
            if len(self.received) < begin + size:
                break
            at = begin + size
            self._handle(messages.to_engine_decoder.decode(bytes(self.received[begin:at])))
        del self.received[:at]
        return True

    def _handle(self, message: messages.ToEngine) -> None:
        match message:
            case messages.Configure():
                self._send(messages.Ready(_info(Path(message.config.model_path))))
            case messages.Submit():
                self._admit(message)
            case messages.Abort():
                self._end(messages.StopReason.ABORTED, message.request_id, message.index)
            case messages.StopSequence():
                self._end(messages.StopReason.STOP_STRING, message.request_id, message.index, message.num_tokens)
            case messages.Query():
                self._send(messages.Answer(message.query_id))
            case messages.Shutdown():
                self.is_leaving = True
            case _:
                pass  # it has no cache to speak of

    def _admit(self, submit: messages.Submit) -> None:
        prompt_ids = list(memoryview(submit.prompt_ids).cast("i"))
        self._send(messages.Started(submit.request_id, messages.Usage(len(prompt_ids), 0, 0, 0, 0.0, 0.0, 0.0)))
        self.answers += [Answer(submit, index, prompt_ids) for index in range(submit.n)]

    def _end(
        self, reason: messages.StopReason, request_id: str, index: int | None, num_tokens: int | None = None
    ) -> None:
        ended = [a for a in self.answers if a.submit.request_id == request_id and index in (None, a.index)]
        if ended:
            self.answers = [answer for answer in self.answers if answer not in ended]
            finished = (
                messages.Finished(request_id, a.index, reason, a.num_tokens if num_tokens is None else num_tokens)
                for a in ended
            )
            self._send(messages.StepOutput((), tuple(finished)))

    def _step(self) -> None:
        self.steps += 1
        tokens: list[messages.Token] = []
        finished: list[messages.Finished] = []
        for answer in self.answers:
            submit = answer.submit
            token_id = answer.prompt_ids[answer.num_tokens % len(answer.prompt_ids)]
            answer.num_tokens += 1
            tokens.append(messages.Token(submit.request_id, answer.index, token_id))
            if answer.num_tokens >= submit.max_tokens:
                reason = messages.StopReason.LENGTH
                finished.append(messages.Finished(submit.request_id, answer.index, reason, answer.num_tokens))
        self._send(messages.StepOutput(tuple(tokens), tuple(finished)))
        if finished:
            self.answers = [answer for answer in self.answers if answer.num_tokens < answer.submit.max_tokens]

    def _send(self, message: messages.ToFront) -> None:
        try:
            self.sock.sendall(messages.encode(message))
        except OSError:
            self.is_leaving = True


def _info(model: Path) -> messages.EngineInfo:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return messages.EngineInfo(
        model="null", family="null", parameters=0, dtype="none", device="none", vocab_size=config["vocab_size"],
        max_context_tokens=1 << 20, block_size=64, grid=1024, num_blocks=NUM_BLOCKS, num_slots=64, bytes_per_token=0,
        slot_bytes=0, state_fingerprint="0" * 64, numerics_profile="0" * 64, eos_token_ids=(),
    )  # fmt: skip


def main() -> int:
    """`python -m daemon.null.engine --fd N`, spawned by the front."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--rate", type=float, default=0.0, help="steps a second; 0: as fast as the front reads")
    arguments = parser.parse_args()
    interval_s = 1 / arguments.rate if arguments.rate else 0.0
    return NullEngine(socket.socket(fileno=arguments.fd), interval_s).run()


if __name__ == "__main__":
    sys.exit(main())
