"""Every error this application raises itself, split by whose fault it is.

    PDError
    +-- ConfigError            the operator's: refused before anything starts
    +-- EngineStartError       the deployment's: an engine did not come up; carries the cause
    +-- RequestRefused         a handle call whose request cannot be served
    +-- LegError               one leg of a request failed on its replica
        +-- PrefillError       nothing was sent to the client: the request may run elsewhere
        +-- DecodeError        raised before the first token only

Errors of a request's content are vLLM's own (`vllm.exceptions.VLLMClientError`, 4xx); refusals for want of capacity are
vLLM's `GracefulHTTPError` with status 503, so that vLLM's handlers write the body.
"""

from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError


class PDError(Exception):
    """The root of this application's errors."""


class ConfigError(PDError, ValueError):
    """A configuration that cannot work. The message names the field, the value and the remedy."""


class EngineStartError(PDError, RuntimeError):
    """An engine did not start; the message holds the cause as the engine's own processes printed it."""


class LegError(PDError, RuntimeError):
    """One leg of a request failed on its replica."""


class PrefillError(LegError):
    """The prefill leg gave no usable KV hand-off."""


class DecodeError(LegError):
    """The decode leg failed before its first token."""


class Unavailable(GracefulHTTPError):
    """503: no replica can take the request now; the HTTP layer adds Retry-After."""

    def __init__(self, message: str) -> None:
        super().__init__(message, HTTPStatus.SERVICE_UNAVAILABLE)


class RequestRefused(PDError):
    """A handle call whose request cannot be served; `status` and `body` are what HTTP would have answered."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(status, body)
        self.status = status
        self.body = body

    def __str__(self) -> str:
        return f"{self.status}: {self.body}"
