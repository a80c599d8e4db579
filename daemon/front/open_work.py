"""What a drain waits for: open requests and warming jobs together."""

import asyncio

from daemon.errors import RequestError
from daemon.front.requests import RequestTable
from daemon.front.warm import WarmJobs


class OpenWork:
    """Both tables, as one."""

    def __init__(self, requests: RequestTable, jobs: WarmJobs) -> None:
        self.requests = requests
        self.jobs = jobs

    def __len__(self) -> int:
        return len(self.requests) + len(self.jobs)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until nothing is open. While draining nothing is added. Returns: whether nothing is."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.requests.wait_idle(timeout_s))
            group.create_task(self.jobs.wait_idle(timeout_s))
        return not self

    def abort_jobs(self, error: RequestError) -> int:
        """Ends every warming job. Returns: how many."""
        jobs = list(self.jobs)
        for job in jobs:
            job.cancel(error)
        return len(jobs)
