"""The engine as a replica sees it: the real one and the simulated one keep to this protocol."""

from dataclasses import dataclass
from typing import Any, Protocol

from vllm.outputs import RequestOutput

from app.engines.wire import EngineCall


@dataclass(frozen=True, slots=True)
class EngineReport:
    """An engine's own counters at its last step, and what it knows of its peers' loose ends."""

    engine_id: str
    running: int
    waiting: int
    kv_usage: float
    """Share of the KV cache blocks in use, 0.0 to 1.0; leased blocks count."""
    prefix_hits: int = 0
    """Prompt tokens found in the engine's own prefix cache since it started."""
    prefix_queries: int = 0
    generated_tokens: int = 0
    transferred_tokens: int = 0
    """Prompt tokens whose KV came by transfer from another engine."""
    released: int = 0
    """Hand-offs given back through this engine since it started."""
    orphans: tuple[dict[str, Any], ...] = ()
    """Hand-offs that were finished while their caller went away: whoever reads this report releases them."""


class Stream(Protocol):
    """One admitted request. Iterating gives its outputs; `abort` frees what it holds, at any time, more than once."""

    async def next(self) -> RequestOutput | None:
        """What was added since the last call, merged; None after the end."""
        ...

    def pending(self) -> RequestOutput | None:
        """What was added and not yet taken, without waiting."""
        ...

    async def abort(self) -> None: ...


class Engine(Protocol):
    """A started engine."""

    engine_id: str

    async def add(self, call: EngineCall) -> Stream:
        """Admit a request: when this returns, the engine owns it and the KV that `kv_transfer_params` point to."""
        ...

    async def release(self, request_id: str, kv_transfer_params: dict[str, Any]) -> None:
        """Tell the prefill engine that its hand-off will not be read."""
        ...

    def report(self) -> EngineReport: ...

    def check_health(self) -> None:
        """Raise if the engine can serve no more."""
        ...

    def shutdown(self) -> None: ...
