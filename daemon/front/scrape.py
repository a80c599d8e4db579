"""One scrape: the front's own counters, its processes, and one question to the engine."""

import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from daemon.errors import ErrorReason, RequestError
from daemon.front import metrics_tiers, metrics_vllm
from daemon.front.config import FrontConfig
from daemon.front.grammars import Grammars
from daemon.front.health import Health
from daemon.front.held import HeldBytes
from daemon.front.metrics_page import Page
from daemon.front.open_work import OpenWork
from daemon.front.supervisor import Supervisor
from daemon.front.tokenizer_pool import TokenizerPool
from daemon.messages import QueryKind

SOURCES = ("device", "host", "disk")  # of prompt tokens that were not computed


@dataclass(frozen=True, slots=True)
class Sources:
    """What is read. `errors` counts calls that failed, by method and reason."""

    work: OpenWork
    supervisor: Supervisor
    health: Health
    tokenizers: TokenizerPool
    grammars: Grammars
    errors: Counter[tuple[str, ErrorReason]]
    held: HeldBytes


class Scrape:
    """Makes pages of it."""

    def __init__(self, config: FrontConfig, version: str, sources: Sources) -> None:
        self._config = config
        self._version = version
        self._sources = sources
        self._started_s = time.time()

    @property
    def is_serving(self) -> bool:
        """New work is taken and would be done."""
        return self._sources.health.is_serving

    async def page(self) -> Page:
        """All there is to say now. An engine that does not answer is missing from it, and the page says so."""
        page = Page()
        self._add_requests(page)
        self._add_front(page)
        page.add("downcore_engine_up", await self._add_engine(page))
        self._add_processes(page)
        return page

    def _add_requests(self, page: Page) -> None:
        work = self._sources.work
        meters = work.requests.meters
        page.add("downcore_open_requests", len(work.requests))
        page.add("downcore_open_warm_jobs", len(work.jobs))
        page.add("downcore_held_request_bytes", self._sources.held.num_bytes)
        cached = meters.cached_tokens
        page.add("downcore_prompt_tokens_total", meters.prompt_tokens - cached.total(), source="computed")
        for source in SOURCES:
            page.add("downcore_prompt_tokens_total", cached[source], source=source)
        page.add("downcore_answer_tokens_total", meters.answer_tokens)
        for end, count in meters.ends.items():
            page.add("downcore_answers_total", count, end=end)
        for (method, reason), count in self._sources.errors.items():
            page.add("downcore_errors_total", count, method=method, reason=reason)
        for name, histogram in (
            ("downcore_request_seconds", meters.request_s),
            ("downcore_request_queue_seconds", meters.queue_s),
            ("downcore_request_prefill_seconds", meters.prefill_s),
            ("downcore_request_decode_seconds", meters.decode_s),
            ("downcore_first_token_seconds", meters.first_token_s),
            ("downcore_token_gap_seconds", meters.token_gap_s),
            ("downcore_request_prompt_tokens", meters.prompt_len),
            ("downcore_request_answer_tokens", meters.answer_len),
        ):
            page.add_histogram(name, histogram)

    def _add_front(self, page: Page) -> None:
        supervisor, info = self._sources.supervisor, self._sources.supervisor.info
        page.add("downcore_serving", self._sources.health.is_serving)
        page.add("downcore_engine_starts_total", supervisor.starts)
        page.add("downcore_engine_loaded_ratio", supervisor.loaded)
        page.add("downcore_worker_kills_total", self._sources.tokenizers.kills, workers="tokenizers")
        page.add("downcore_worker_kills_total", self._sources.grammars.kills, workers="grammars")
        page.add("downcore_start_time_seconds", self._started_s)
        if info is not None:
            page.add("downcore_pulse_age_seconds", supervisor.pulse_age_s)
            page.add(
                "downcore_info", 1, version=self._version,
                model=info.model, family=info.family, dtype=info.dtype, device=info.device,
            )  # fmt: skip
            metrics_vllm.add_requests(page, self._sources.work.requests.meters, info.model)

    async def _add_engine(self, page: Page) -> bool:
        """Returns: whether it has answered."""
        try:
            answer = await self._sources.supervisor.query(QueryKind.METERS)
        except RequestError:
            return False
        info = self._sources.supervisor.info
        if answer.meters is None or info is None:
            return False
        metrics_tiers.add_tiers(page, answer.tiers, answer.meters)
        metrics_tiers.add_engine(page, answer.meters)
        if self._config.metrics_namespaces:
            metrics_tiers.add_namespaces(page, answer.meters, self._config.metrics_namespaces)
        metrics_vllm.add_engine(page, answer.tiers, answer.meters, info.model)
        return True

    def _add_processes(self, page: Page) -> None:
        pids = {"front": (os.getpid(),), "engine": (self._sources.supervisor.pid,)}
        for name, (pid,) in pids.items():
            use = _use_of((pid,))
            if use is not None:
                _add_use(page, name, use)
                page.add("downcore_process_cpu_seconds_total", use.cpu_s, process=name)
        workers = {"tokenizers": self._sources.tokenizers.pids, "grammars": self._sources.grammars.pids}
        for name, some in workers.items():  # of them processor time is no counter: some are replaced
            use = _use_of(some)
            if use is not None:
                _add_use(page, name, use)


@dataclass(frozen=True, slots=True)
class _Use:
    resident_bytes: int
    num_fds: int
    cpu_s: float


def _add_use(page: Page, name: str, use: _Use) -> None:
    page.add("downcore_process_resident_bytes", use.resident_bytes, process=name)
    page.add("downcore_process_open_fds", use.num_fds, process=name)


def _use_of(pids: Iterable[int]) -> _Use | None:
    """What these processes have together; None where none of them is there."""
    found: list[_Use] = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            cpu = process.cpu_times()
            found.append(_Use(process.memory_info().rss, process.num_fds(), cpu.user + cpu.system))
        except psutil.Error:
            continue
    if not found:
        return None
    return _Use(sum(u.resident_bytes for u in found), sum(u.num_fds for u in found), sum(u.cpu_s for u in found))
