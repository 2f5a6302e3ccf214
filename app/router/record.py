"""How a request went: one record per prompt, gathered per HTTP request so that its response can say so."""

import logging
import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from app.router.decision import Decision, Reason, Route
from app.telemetry.metrics import requests_total

logger = logging.getLogger("ray.serve")


@dataclass(slots=True)
class Record:
    """One prompt's way through the router; the log line and the counter are written once, at its end."""

    request_id: str
    prompt_tokens: int
    decision: Decision
    started: float = field(default_factory=time.perf_counter)
    prefill_s: float | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0

    def reroute(self, reason: Reason) -> None:
        """The hand-off failed: the decode replica prefills."""
        self.decision = Decision(Route.LOCAL, reason)

    def finish(self, outcome: str) -> None:
        """`outcome`: finished, cancelled or error."""
        requests_total().inc(tags={"route": self.decision.route, "reason": self.decision.reason, "outcome": outcome})
        logger.info(
            "request request_id=%s route=%s reason=%s outcome=%s prompt_tokens=%d output_tokens=%d cached_tokens=%s "
            "prefill_ms=%s total_ms=%.1f",
            self.request_id,
            self.decision.route,
            self.decision.reason,
            outcome,
            self.prompt_tokens,
            self.output_tokens,
            self.cached_tokens,
            "-" if self.prefill_s is None else f"{self.prefill_s * 1000:.1f}",
            (time.perf_counter() - self.started) * 1000,
        )


records: ContextVar[list[Record] | None] = ContextVar("records", default=None)
"""The records of the HTTP request or handle call that is being served in this context."""


def summary(of: list[Record]) -> tuple[str, str] | None:
    """(route, reason) of a response: one value each, or one per prompt, comma-separated, where they differ."""
    if not of:
        return None
    routes = [record.decision.route.value for record in of]
    reasons = [record.decision.reason.value for record in of]
    if len(set(zip(routes, reasons, strict=True))) == 1:
        return routes[0], reasons[0]
    return ",".join(routes), ",".join(reasons)
