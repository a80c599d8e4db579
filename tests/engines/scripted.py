"""An engine without a model: it speaks daemon/messages.py and answers each prompt by saying it again, and again.

Run as `python scripted.py [options] --fd N`. Choice i of a request says the prompt from its token i on. An end token in
the prompt ends the answer there, so a test writes its script into its prompt. SIGUSR1 stops the pulse, SIGUSR2 lets
it go on. It holds nothing, so what it lists is what the front has asked for and not ended.
"""

import argparse
import array
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass, field

from daemon import messages
from daemon.errors import ErrorReason

PULSE_S = 0.1


@dataclass
class Run:
    """One request."""

    submit: messages.Submit
    prompt: "array.array[int]"
    arrived_s: float
    made: list[int] = field(default_factory=list)  # tokens of each choice so far
    ended: list[bool] = field(default_factory=list)
    started_s: float | None = None


class Scripted:
    """The engine's loop: read messages, admit, make one token of each running choice."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.sock = socket.socket(fileno=args.fd)
        self.received = bytearray()
        self.waiting: dict[str, Run] = {}
        self.running: dict[str, Run] = {}
        self.steps = 0
        self.pulsing = True
        self.leaving = False
        self.failing = False

    def main(self) -> int:
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "pulsing", False))
        signal.signal(signal.SIGUSR2, lambda *_: setattr(self, "pulsing", True))
        if not self.configure():
            return 1
        next_pulse_s = next_step_s = 0.0
        while not self.leaving:
            now_s = time.monotonic()
            wake_s = min(next_pulse_s, next_step_s) if self.running else next_pulse_s
            if not self.poll(max(wake_s - now_s, 0.0)):
                return 3
            self.admit()
            now_s = time.monotonic()
            if self.running and now_s >= next_step_s:
                self.step()
                next_step_s = now_s + self.args.token_s
            if now_s >= next_pulse_s:
                next_pulse_s = now_s + PULSE_S
                if self.pulsing:
                    self.send(messages.Pulse(self.steps, len(self.waiting), len(self.running)))
        return 0

    def configure(self) -> bool:
        while not self.received:
            if not self.poll(10.0, handle=False):
                return False
        (first,) = self.split()
        assert isinstance(first, messages.Configure)
        self.send(messages.Loading(1, 4))
        if self.args.crash_loading:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.args.load_s)
        if self.args.fail_load:
            self.send(messages.LoadFailed(self.args.fail_load))
            return False
        self.send(messages.Ready(self.info()))
        return True

    def info(self) -> messages.EngineInfo:
        return messages.EngineInfo(
            model="scripted", family="scripted", parameters=1, dtype="float32", device="cpu",
            vocab_size=self.args.vocab, max_context_tokens=self.args.context, block_size=64, grid=1024,
            num_blocks=self.args.blocks, num_slots=64, bytes_per_token=4, slot_bytes=0, state_fingerprint="f" * 64,
            numerics_profile="p" * 64, eos_token_ids=(self.args.eos,),
        )  # fmt: skip

    def send(self, message: messages.ToFront) -> None:
        try:
            self.sock.sendall(messages.encode(message))
        except OSError:
            self.leaving = True

    def poll(self, timeout_s: float, *, handle: bool = True) -> bool:
        readable, _, _ = select.select([self.sock], [], [], timeout_s)
        if readable:
            data = self.sock.recv(1 << 20)
            if not data:
                return False
            self.received += data
        if handle:
            for message in self.split():
                self.handle(message)
        return True

    def split(self) -> list[messages.ToEngine]:
        found: list[messages.ToEngine] = []
        while len(self.received) >= 4:
            (size,) = messages.HEADER.unpack_from(self.received)
            if len(self.received) < 4 + size:
                break
            found.append(messages.to_engine_decoder.decode(bytes(self.received[4 : 4 + size])))
            del self.received[: 4 + size]
        return found

    def handle(self, message: messages.ToEngine) -> None:
        match message:
            case messages.Submit():
                if len(self.waiting) >= self.args.max_queue:
                    self.send(messages.Rejected(message.request_id, ErrorReason.QUEUE_FULL, "the queue is full"))
                    return
                prompt = array.array("i", message.prompt_ids)
                run = Run(message, prompt, time.monotonic(), [0] * message.n, [False] * message.n)
                self.waiting[message.request_id] = run
            case messages.Abort():
                self.end(message.request_id)
            case messages.StopSequence():
                run = self.running.get(message.request_id)
                if run is not None and not run.ended[message.index]:
                    run.ended[message.index] = True
                    finished = messages.Finished(
                        message.request_id, message.index, messages.StopReason.STOP_STRING, message.num_tokens
                    )
                    self.send(messages.StepOutput((), (finished,)))
                    if all(run.ended):
                        self.end(message.request_id)
            case messages.Query():
                self.answer(message)
            case messages.Shutdown():
                self.leaving = True
            case messages.Configure():
                raise AssertionError("configured twice")

    def end(self, request_id: str) -> None:
        self.waiting.pop(request_id, None)
        self.running.pop(request_id, None)

    def admit(self) -> None:
        now_s = time.monotonic()
        for request_id, run in list(self.waiting.items()):
            deadline_s = run.submit.deadline_s
            if deadline_s is not None and now_s > run.arrived_s + deadline_s:
                del self.waiting[request_id]
                self.send(messages.Rejected(request_id, ErrorReason.DEADLINE_EXCEEDED, "the deadline is over"))
            elif len(self.running) < self.args.max_running:
                del self.waiting[request_id]
                self.running[request_id] = run
                run.started_s = now_s
                usage = messages.Usage(len(run.prompt), 0, 0, 0, now_s - run.arrived_s, 0.0, now_s - run.arrived_s)
                self.send(messages.Started(request_id, usage))

    def step(self) -> None:
        self.steps += 1
        tokens: list[messages.Token] = []
        finished: list[messages.Finished] = []
        for request_id, run in list(self.running.items()):
            submit = run.submit
            for index in range(submit.n):
                if run.ended[index]:
                    continue
                token_id = run.prompt[(run.made[index] + index) % len(run.prompt)]
                run.made[index] += 1
                made = run.made[index]
                chosen, top = (None, ())
                if submit.sampling.logprobs:
                    chosen = -0.5
                    top = tuple(messages.Logprob(i, -1.0 - i) for i in range(submit.sampling.top_logprobs))
                tokens.append(messages.Token(request_id, index, token_id, chosen, top))
                if token_id in submit.stop_token_ids and made >= submit.min_tokens:
                    run.ended[index] = True
                    reason = messages.StopReason.STOP_TOKEN
                    finished.append(messages.Finished(request_id, index, reason, made, token_id))
                elif made >= submit.max_tokens:
                    run.ended[index] = True
                    finished.append(messages.Finished(request_id, index, messages.StopReason.LENGTH, made))
            if all(run.ended):
                del self.running[request_id]
        self.send(messages.StepOutput(tuple(tokens), tuple(finished)))

    def answer(self, query: messages.Query) -> None:
        if self.args.mute:
            return
        match query.kind:
            case messages.QueryKind.TIERS:
                row = messages.TierRow("device", "ram", 1024, 512, 256, 256, 0, 7, 9, 1, 16, 4, 4, 64, 64)
                self.send(messages.Answer(query.query_id, tiers=(row,)))
            case messages.QueryKind.SEQUENCES:
                self.send(messages.Answer(query.query_id, sequences=tuple(self.rows(query.id))))
            case messages.QueryKind.LEDGER:
                rows = tuple(
                    messages.LedgerRow("device", "blocks", f"{request_id}/0", 64, 1) for request_id in self.running
                )
                self.send(messages.Answer(query.query_id, ledger=rows))

    def rows(self, wanted: str) -> list[messages.SequenceRow]:
        rows: list[messages.SequenceRow] = []
        for state, runs in (("queued", self.waiting), ("decoding", self.running)):
            for request_id, run in runs.items():
                for index in range(run.submit.n):
                    if not run.ended[index] and wanted in ("", request_id, f"{request_id}/{index}"):
                        rows.append(
                            messages.SequenceRow(
                                request_id, index, state, len(run.prompt), run.made[index], len(run.prompt), 0, 1, 0,
                                64, time.monotonic() - run.arrived_s, 0, run.submit.max_tokens,
                            )
                        )  # fmt: skip
        return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--context", type=int, default=1 << 20)
    parser.add_argument("--blocks", type=int, default=1 << 16)
    parser.add_argument("--eos", type=int, default=0)
    parser.add_argument("--token-s", type=float, default=0.001)
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--max-queue", type=int, default=4096)
    parser.add_argument("--fail-load", default="")
    parser.add_argument("--crash-loading", action="store_true")
    parser.add_argument("--mute", action="store_true", help="answers no query")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(Scripted(parse()).main())
