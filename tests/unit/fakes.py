"""Groups of engines that live in the test: the request flow's whole story without Ray."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from vllm.inputs import tokens_input
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from app.engines.wire import ADMITTED, EngineCall, PrefillAnswer, encode_chunk

HANDOFF = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "p",
    "remote_request_id": "r",
    "remote_host": "h",
    "remote_port": 1,
    "remote_block_ids": [[1]],
    "unknown_to_us": "survives",
}


def call(**params: Any) -> EngineCall:
    return EngineCall(
        "req-1",
        tokens_input(list(range(300))),
        SamplingParams(**({"max_tokens": 3, "output_kind": RequestOutputKind.DELTA} | params)),
    )


def chunk(text: str, *, finish: str | None = None) -> bytes:
    piece = CompletionOutput(0, text, [1], None, None, finish_reason=finish)
    return encode_chunk(RequestOutput("req-1", None, None, None, [piece], finish is not None))


ANSWER = [ADMITTED, chunk("a"), chunk("b"), chunk("c", finish="length")]


@dataclass
class FakePrefillLeg:
    group: "FakeGroup"
    cancelled: bool = False

    async def answer(self) -> PrefillAnswer | None:
        await self.group.gate("prefill")
        if isinstance(self.group.answer, Exception):
            raise self.group.answer
        return self.group.answer

    def cancel(self) -> None:
        self.cancelled = True
        if self.group.stops:
            self.group.gates["prefill"].set()
            self.group.answer = asyncio.CancelledError("stopped by cancel")  # type: ignore[assignment]


@dataclass
class FakeDecodeLeg:
    group: "FakeGroup"
    call: EngineCall
    items: list[Any]
    cancelled: bool = False

    async def next(self) -> bytes:
        await self.group.gate("admission" if len(self.items) == self.group.length else "decode")
        if not self.items:
            raise StopAsyncIteration
        item = self.items.pop(0)
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class FakeGroup:
    """`gates` hold a leg at a window until a test opens it."""

    answer: Any = field(default_factory=lambda: PrefillAnswer(dict(HANDOFF), 0))
    scripts: list[list[Any]] = field(default_factory=lambda: [list(ANSWER)])
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    stops: bool = False
    legs: list[Any] = field(default_factory=list)
    calls: list[EngineCall] = field(default_factory=list)
    released: list[dict[str, Any]] = field(default_factory=list)
    length: int = 0

    async def gate(self, name: str) -> None:
        if name in self.gates:
            await self.gates[name].wait()

    def prefill(self, call: EngineCall) -> FakePrefillLeg:
        self.calls.append(call)
        self.legs.append(leg := FakePrefillLeg(self))
        return leg

    def decode(self, call: EngineCall) -> FakeDecodeLeg:
        script = self.scripts.pop(0)
        if call.kv_transfer_params is None and script and script[0] == ADMITTED:
            script = script[1:]
        self.length = len(script) if call.kv_transfer_params is not None else -1
        self.calls.append(call)
        self.legs.append(leg := FakeDecodeLeg(self, call, script))
        return leg

    async def release(self, request_id: str, kv_transfer_params: dict[str, Any]) -> None:
        self.released.append(kv_transfer_params)

    async def reports(self, timeout_s: float) -> list[Any]:
        return []
