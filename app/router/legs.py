"""The two legs of a request as Serve calls: the one thin layer in which the router touches Ray.

Serve's response generator has no `aclose`, and dropping it does not stop the callee: whoever opens a leg cancels it.
"""

from collections.abc import Awaitable
from typing import Any, Protocol

from ray.serve.handle import DeploymentHandle

from app.engines.engine import EngineReport
from app.engines.wire import EngineCall, PrefillAnswer


class PrefillLeg(Protocol):
    """A running prefill call."""

    def answer(self) -> Awaitable[PrefillAnswer | None]: ...

    def cancel(self) -> None: ...


class DecodeLeg(Protocol):
    """A running decode call: an iterator of chunks."""

    def next(self) -> Awaitable[bytes]:
        """The next chunk. Raises StopAsyncIteration at the end."""
        ...

    def cancel(self) -> None: ...


class Group(Protocol):
    """What the router needs of one group of engines."""

    def prefill(self, call: EngineCall) -> PrefillLeg: ...

    def decode(self, call: EngineCall) -> DecodeLeg: ...

    async def release(self, request_id: str, kv_transfer_params: dict[str, Any]) -> None: ...

    async def reports(self, timeout_s: float) -> list[EngineReport | BaseException]: ...


class ServePrefillLeg:
    def __init__(self, response: Any) -> None:
        self._response = response

    async def answer(self) -> PrefillAnswer | None:
        answer: PrefillAnswer | None = await self._response
        return answer

    def cancel(self) -> None:
        self._response.cancel()


class ServeDecodeLeg:
    def __init__(self, response: Any) -> None:
        self._response = response

    async def next(self) -> bytes:
        chunk: bytes = await anext(self._response)
        return chunk

    def cancel(self) -> None:
        self._response.cancel()


class ServeGroup:
    """One deployment of engine replicas."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    def prefill(self, call: EngineCall) -> PrefillLeg:
        return ServePrefillLeg(self._handle.prefill.remote(call))

    def decode(self, call: EngineCall) -> DecodeLeg:
        return ServeDecodeLeg(self._streaming.generate.remote(call))

    async def release(self, request_id: str, kv_transfer_params: dict[str, Any]) -> None:
        await self._handle.release.remote(request_id, kv_transfer_params)

    async def reports(self, timeout_s: float) -> list[EngineReport | BaseException]:
        answers: list[EngineReport | BaseException] = await self._handle.broadcast(
            "report", take_orphans=True
        ).results_async(timeout_s=timeout_s, return_exceptions=True)
        return answers
