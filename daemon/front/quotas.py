"""Quotas that the file of principals gives to namespaces: told to each engine, and again when the file changes."""

import asyncio
import logging

from daemon import cache_messages as cm
from daemon.errors import RequestError
from daemon.front.principals import Directory
from daemon.front.supervisor import Supervisor
from daemon.front.watched import Watched

log = logging.getLogger("downcore.front")

INTERVAL_S = 1.0
Limits = tuple[int | None, int | None]  # cached and pinned bytes


class QuotaKeeper:
    """Keeps the engine's quotas those of the file. What an operator sets stands until the next start of an engine."""

    def __init__(self, directory: Watched[Directory], supervisor: Supervisor) -> None:
        self._directory = directory
        self._supervisor = supervisor

    async def run(self) -> None:
        """Until cancelled."""
        told: dict[str, Limits] = {}
        start = 0
        while True:
            await self._supervisor.ready.wait()
            if self._supervisor.starts != start:
                start, told = self._supervisor.starts, {}
            try:
                await self._tell(told)
            except RequestError as error:
                log.warning("quotas are not set yet: %s", error)
            await asyncio.sleep(INTERVAL_S)

    async def _tell(self, told: dict[str, Limits]) -> None:
        wanted = self._directory.value.quotas
        for namespace in told.keys() - wanted.keys():
            await self._remove(namespace)
            del told[namespace]
        for namespace, limits in wanted.items():
            if told.get(namespace) != limits:
                await self._set(namespace, limits)
                told[namespace] = limits

    async def _set(self, namespace: str, limits: Limits) -> None:
        await self._supervisor.ask(lambda query_id: cm.SetQuota(query_id, namespace, *limits), cm.QuotaList)

    async def _remove(self, namespace: str) -> None:
        await self._supervisor.ask(lambda query_id: cm.RemoveQuota(query_id, namespace), cm.QuotaList)
