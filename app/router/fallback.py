"""The budget of fallbacks: how many long prompts decode replicas may prefill themselves at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

from app.errors import Unavailable


class FallbackBudget:
    """A fallback helps one request at the cost of everybody's inter-token latency: past the limit there is a 503."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0

    def check(self, why: str) -> None:
        """Raise `Unavailable` when no fallback is left."""
        if self.taken >= self.limit:
            raise Unavailable(
                f"The prompt cannot be prefilled remotely ({why}) and {self.taken} of "
                f"{self.limit} fallbacks to decode replicas are in use. Please try again later."
            )

    @contextmanager
    def take(self, why: str) -> Iterator[None]:
        """Hold one fallback for a request's prefill and decode."""
        self.check(why)
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1
