"""An engine without a model: it speaks daemon/messages.py and answers each prompt by saying it again, and again.

Run as `python scripted.py [options] --fd N`. Choice i of a request says the prompt from its token i on. An end token in
the prompt ends the answer there, so a test writes its script into its prompt. SIGUSR1 stops the pulse, SIGUSR2 lets
it go on. It holds nothing, so what it lists is what the front has asked for and not ended. Its cache has names and no
bytes (scripted_cache.py).
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

from daemon import cache_messages as cm
from daemon import messages
from daemon.errors import ErrorReason
from daemon.kv_messages import KvUnwatch, KvWatch
from tests.engines.scripted_cache import ScriptedCache
from tests.engines.scripted_meters import meters

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
        self.tiers = tuple(cm.TierName(name) for name in args.tiers.split(","))
        self.cache = ScriptedCache(
            self.send,
            tiers=self.tiers,
            num_prefixes=args.prefixes,
            num_records=args.records,
            num_damaged=args.damaged,
        )

    def main(self) -> int:
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "pulsing", False))
        signal.signal(signal.SIGUSR2, lambda *_: setattr(self, "pulsing", True))
        if not self.configure():
            return 1
        next_pulse_s = next_step_s = next_tick_s = 0.0
        while not self.leaving:
            now_s = time.monotonic()
            wake_s = min(next_pulse_s, next_step_s) if self.running else next_pulse_s
            wake_s = min(wake_s, next_tick_s) if self.cache.is_busy else wake_s
            if not self.poll(max(wake_s - now_s, 0.0)):
                return 3
            self.admit()
            now_s = time.monotonic()
            if self.running and now_s >= next_step_s:
                self.step()
                next_step_s = now_s + self.args.token_s
            if self.cache.is_busy and now_s >= next_tick_s:
                self.cache.tick()
                next_tick_s = now_s + self.args.tick_s
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
            tiers=self.tiers,
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
                run = self.running.get(message.request_id) or self.waiting.get(message.request_id)
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
            case KvWatch() | KvUnwatch():
                pass  # it has no blocks to tell of
            case _:
                if not self.args.mute:
                    self.cache.handle(message)

    def end(self, request_id: str) -> None:
        self.cache.abort(request_id)
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
            case messages.QueryKind.TIERS | messages.QueryKind.METERS:
                rows = (
                    messages.TierRow("device", "ram", 1024, 512, 256, 256, 0, 7, 9, 1, 16, 4, 4, 64, 64),
                    messages.TierRow(
                        "host", "ram", 2048, 0, 1024, 1024, 0, 5, 4, 0, 32, 16, 16, 0, 0,
                        used_bytes=2048, reads=4, read_bytes=4096, read_s=0.002, writes=2, written_bytes=2048,
                        write_s=0.5, is_unified=True, driver_free_bytes=None, host_free_bytes=77,
                    ),
                    messages.TierRow(
                        "disk", "ext4, direct I/O", 8192, 0, 4096, 4096, 512, 3, 1, 2, 128, 64, 64, 0, 0,
                        dirty_bytes=256, used_bytes=5000, quota_bytes=8192, dropped_writes=6, verify_failures=1,
                        quarantined=1, gate_refusals=9, state=messages.TierState.READ_ONLY,
                        state_reason="no space is left",
                    ),
                )  # fmt: skip
                found = tuple(row for row in rows if row.name in self.tiers)
                told = None
                if query.kind is messages.QueryKind.METERS:
                    sequences = {"queued": len(self.waiting), "decoding": len(self.running)}
                    told = meters(self.tiers, steps=self.steps, sequences=sequences)
                self.send(messages.Answer(query.query_id, tiers=found, meters=told))
            case messages.QueryKind.SEQUENCES:
                self.send(messages.Answer(query.query_id, sequences=tuple(self.rows(query.id))))
            case messages.QueryKind.LEDGER:
                rows = tuple(
                    messages.LedgerRow("device", "blocks", f"{request_id}/0", 64, 1) for request_id in self.running
                )
                jobs = tuple(
                    messages.LedgerRow(reading.question.tier, "scratch", type(reading.question).__name__, 4096, 1)
                    for reading in self.cache.reading.values()
                )
                self.send(messages.Answer(query.query_id, ledger=rows + jobs))

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
                                stream=messages.StreamRow(2, 3, 4, 4096, 1e6, None) if index else None,
                            )
                        )  # fmt: skip
        for request_id, warming in self.cache.warming.items():
            state = "queued" if warming.stage is cm.WarmStage.QUEUED else "prefilling"
            if wanted in ("", request_id, f"{request_id}/0"):
                rows.append(
                    messages.SequenceRow(
                        request_id, 0, state, len(warming.warm.prompt_ids) // 4, 0, warming.done_tokens,
                        warming.cached_tokens, 1, 0, 64, time.monotonic() - warming.arrived_s, 0, 0,
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
    parser.add_argument("--mute", action="store_true", help="answers no question")
    parser.add_argument("--tiers", default="device")
    parser.add_argument("--tick-s", type=float, default=0.001, help="time of a step of the cache's jobs")
    parser.add_argument("--prefixes", type=int, default=0, help="how many are cached from the beginning")
    parser.add_argument("--records", type=int, default=8, help="of a tier, to be verified")
    parser.add_argument("--damaged", type=int, default=0, help="of them")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(Scripted(parse()).main())
