"""A finished prefill's KV, waiting on its prefill engine: a lease with one owner and one release.

It ends in exactly one way: a decode engine admits it (and then reads or frees it), or it is given back.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from app.telemetry.metrics import handoffs_released_total

logger = logging.getLogger("ray.serve")


class Handoff:
    """`params` go verbatim to the decode engine; `release` tells the prefill engine that nobody will read."""

    def __init__(
        self, request_id: str, params: dict[str, Any], release: Callable[[str, dict[str, Any]], Awaitable[None]]
    ) -> None:
        self.request_id = request_id
        self.params = params
        self._release = release
        self._open = True

    def admitted(self) -> None:
        """A decode engine owns it now."""
        self._open = False

    async def give_back(self, why: str) -> None:
        """Free the KV; the second call, or a call after `admitted`, does nothing."""
        if not self._open:
            return
        self._open = False
        handoffs_released_total().inc(tags={"why": why})
        try:
            await self._release(self.request_id, self.params)
        except Exception as error:
            # The prefill engine's lease is what is left then.
            logger.warning("handoff_not_released request_id=%s why=%s error=%r", self.request_id, why, error)
        else:
            logger.info("handoff_released request_id=%s why=%s", self.request_id, why)
