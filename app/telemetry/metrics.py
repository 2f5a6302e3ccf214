"""The application's own metrics, exported by Ray on every node."""

from functools import cache

from ray.serve.metrics import Counter


@cache
def requests_total() -> Counter:
    """Prompts served, by route, reason and outcome."""
    return Counter(
        "pd_requests_total",
        description="Prompts served, by the route they took, why, and how they ended.",
        tag_keys=("route", "reason", "outcome"),  # type: ignore[arg-type]
    )


@cache
def handoffs_released_total() -> Counter:
    """Hand-offs that no decode engine read, released before their lease ended."""
    return Counter(
        "pd_handoffs_released_total",
        description="KV hand-offs that were given back unread, by why.",
        tag_keys=("why",),
    )
