"""Who is alive: one group's replicas as this router last saw them, by their own reports."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from app.engines.engine import EngineReport
from app.router.legs import Group

logger = logging.getLogger("ray.serve")


class Pool:
    """Looks at every replica of a group each `interval_s`; a replica that does not answer is not alive."""

    def __init__(
        self,
        name: str,
        group: Group,
        interval_s: float,
        on_orphan: Callable[[dict[str, Any]], None],
        empty: asyncio.Event,
    ) -> None:
        self.name = name
        self.group = group
        self.reports: list[EngineReport] = []
        self.trouble = "no replica has reported yet"
        self.empty = empty
        """Set while nobody is known to be alive."""
        self._interval_s = interval_s
        self._on_orphan = on_orphan

    @property
    def alive(self) -> int:
        return len(self.reports)

    async def watch(self) -> None:
        """Look for ever; the owner cancels."""
        while True:
            await self.look()
            await asyncio.sleep(self._interval_s)

    async def look(self) -> None:
        """Ask every replica once."""
        before = self.alive
        try:
            answers = await self.group.reports(timeout_s=max(5.0, 4 * self._interval_s))
        except Exception as error:  # No replica to ask, or the controller is away: either way nobody is known alive.
            answers = [error]
        self.reports = [answer for answer in answers if isinstance(answer, EngineReport)]
        if self.reports:
            self.empty.clear()
        else:
            self.empty.set()
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        self.trouble = f"{type(failures[0]).__name__}: {failures[0]}" if failures else "no replica is running"
        for report in self.reports:
            for orphan in report.orphans:
                self._on_orphan(orphan)
        if before != self.alive:
            logger.info("pool group=%s alive=%d before=%d", self.name, self.alive, before)
