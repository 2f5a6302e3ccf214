"""A simulated engine for scale, fault and overhead tests. It runs no model.

It keeps to the same protocol as the real one: outputs are vLLM's `RequestOutput`, a prefill request ends in
`kv_transfer_params`, a decode request that brings them back skips its prefill. It holds no KV, so it has no leases.
Its answer to a prompt is a function of the prompt alone, so routes can be compared.
"""

import asyncio
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from app.config import AppConfig
from app.engines.engine import EngineReport, Stream
from app.engines.wire import EngineCall


class SimulatedEngine:
    """Answers prompts with numbered words at the configured speed."""

    def __init__(self, config: AppConfig, engine_id: str) -> None:
        self.engine_id = engine_id
        self.speed = config.simulated
        self.running: set[str] = set()
        self.released = 0
        self.generated = 0

    async def add(self, call: EngineCall) -> Stream:
        return SimulatedStream(self, call)

    async def release(self, request_id: str, kv_transfer_params: dict[str, Any]) -> None:
        self.released += 1

    def report(self) -> EngineReport:
        return EngineReport(
            self.engine_id, len(self.running), 0, 0.0, generated_tokens=self.generated, released=self.released
        )

    def check_health(self) -> None:
        """A simulated engine never dies by itself."""

    def shutdown(self) -> None:
        """Nothing was started."""


class SimulatedStream:
    """One request in the simulated engine."""

    def __init__(self, engine: SimulatedEngine, call: EngineCall) -> None:
        self._engine = engine
        self._call = call
        self._prompt: list[int] = call.prompt["prompt_token_ids"]  # type: ignore[typeddict-item]
        self._first_id = sum(self._prompt)
        self._total = call.params.max_tokens or 16
        self._sent = 0
        self._due: float | None = None
        self._done = False
        engine.running.add(call.request_id)

    async def next(self) -> RequestOutput | None:
        if self._done:
            return None
        now = asyncio.get_running_loop().time()
        if self._due is None:
            remote = (self._call.kv_transfer_params or {}).get("do_remote_prefill")
            prefill = 0 if remote else len(self._prompt)
            self._due = now + (prefill / rate if (rate := self._engine.speed.prefill_tokens_per_s) else 0)
        await asyncio.sleep(max(0, self._due - now))
        return self._output(self._ready())

    def pending(self) -> RequestOutput | None:
        return None

    async def abort(self) -> None:
        self._engine.running.discard(self._call.request_id)
        self._done = True

    def _ready(self) -> int:
        """Tokens that an engine of this speed has produced by now, at least one."""
        assert self._due is not None
        itl = self._engine.speed.itl_ms / 1000
        if itl == 0 or self._call.params.output_kind is RequestOutputKind.FINAL_ONLY:
            self._due += itl * (self._total - self._sent)
            return self._total - self._sent if itl else 1
        late = asyncio.get_running_loop().time() - self._due
        count = min(self._total - self._sent, 1 + int(late / itl))
        self._due += itl * count
        return count

    def _output(self, count: int) -> RequestOutput:
        ids = [(self._first_id + number) % 1000 + 1000 for number in range(self._sent, self._sent + count)]
        self._sent += count
        self._engine.generated += count
        finished = self._sent >= self._total
        if finished:
            self._done = True
            self._engine.running.discard(self._call.request_id)
        text = "".join(f" {token}" for token in ids)
        return RequestOutput(
            request_id=self._call.request_id,
            prompt=None,
            prompt_token_ids=self._prompt,
            prompt_logprobs=None,
            outputs=[CompletionOutput(0, text, ids, None, None, finish_reason="length" if finished else None)],
            finished=finished,
            num_cached_tokens=0,
            kv_transfer_params=self._handoff() if finished else None,
        )

    def _handoff(self) -> dict[str, Any] | None:
        if not (self._call.kv_transfer_params or {}).get("do_remote_decode"):
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine.engine_id,
            "remote_request_id": self._call.request_id,
            "remote_host": "simulated",
            "remote_port": 1,
            "remote_block_ids": [[1]],
            "remote_num_tokens": len(self._prompt),
        }
