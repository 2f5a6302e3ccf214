"""vLLM's `AsyncLLM` behind the `Engine` protocol; the one module that reaches inside it.

Read from vLLM 0.32.0, `vllm/v1/engine/async_llm.py`: `add_request` returns once the engine core has the request, and
its collector merges outputs that nobody has taken yet. `generate` hides both, so this module does its loop itself:
admission must be known (from then on the engine frees the KV of a hand-off), and merging is what coalesces tokens.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.outputs import RequestOutput
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from app.engines.engine import EngineReport, Stream
from app.engines.wire import EngineCall
from app.errors import EngineStartError

SHUTDOWN_S = 20.0


class VllmEngine:
    """A started `AsyncLLM`; make one with `start`."""

    def __init__(self, llm: AsyncLLM, counters: "Counters", engine_id: str) -> None:
        self.llm = llm
        self.engine_id = engine_id
        self._counters = counters
        self._released = 0

    @classmethod
    async def start(cls, args: AsyncEngineArgs, engine_id: str, timeout_s: float) -> "VllmEngine":
        """Start an engine within `timeout_s` seconds.

        Raises:
            EngineStartError: with the cause as the engine's processes printed it.
        """
        counters = Counters()
        async with explained_failure(timeout_s):
            # Blocks for a minute or more; the replica's event loop must go on answering health checks.
            llm = await asyncio.to_thread(
                AsyncLLM.from_engine_args,
                args,
                usage_context=UsageContext.ENGINE_CONTEXT,
                stat_loggers=[lambda config, index: counters],
            )
            await llm.get_supported_tasks()
        return cls(llm, counters, engine_id)

    async def add(self, call: EngineCall) -> Stream:
        params = call.params
        if call.kv_transfer_params is not None:
            params = params.clone()
            params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": call.kv_transfer_params}
        collector = await self.llm.add_request(
            call.request_id, call.prompt, params, priority=call.priority, **call.options
        )
        return VllmStream(self.llm, collector)

    async def release(self, request_id: str, kv_transfer_params: dict[str, Any]) -> None:
        await self.llm.notify_kv_transfer_request_rejected(request_id, kv_transfer_params)
        self._released += 1

    def report(self) -> EngineReport:
        return replace(self._counters.report(self.engine_id), released=self._released)

    def check_health(self) -> None:
        if self.llm.errored:
            raise self.llm.dead_error

    def shutdown(self) -> None:
        # vLLM kills its processes after 5 s by default, which leaves their shared memory behind.
        self.llm.shutdown(timeout=SHUTDOWN_S)


class VllmStream:
    """One request in `AsyncLLM`."""

    def __init__(self, llm: AsyncLLM, collector: RequestOutputCollector) -> None:
        self._llm = llm
        self._collector = collector
        self._finished = False

    async def next(self) -> RequestOutput | None:
        if self._finished:
            return None
        return self._taken(self._collector.get_nowait() or await self._collector.get())

    def pending(self) -> RequestOutput | None:
        output = self._collector.get_nowait()
        return None if output is None else self._taken(output)

    async def abort(self) -> None:
        if not self._finished:
            await self._llm.abort(self._collector.request_id, internal=True)

    def _taken(self, output: Any) -> RequestOutput:
        assert isinstance(output, RequestOutput)
        self._finished = output.finished
        if self._finished:
            self._collector.close()
        return output


class Counters(StatLoggerBase):
    """Keeps the engine's statistics of its last step: what `EngineReport` is made of."""

    def __init__(self, vllm_config: VllmConfig | None = None, engine_index: int = 0) -> None:
        self._last = SchedulerStats()
        self._hits = self._queries = self._generated = self._transferred = 0

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self._last = scheduler_stats
            self._hits += scheduler_stats.prefix_cache_stats.hits
            self._queries += scheduler_stats.prefix_cache_stats.queries
        if iteration_stats is not None:
            self._generated += iteration_stats.num_generation_tokens
            self._transferred += iteration_stats.prompt_token_stats.external_kv_transfer

    def log_engine_initialized(self) -> None:
        """Nothing to say: the deployment logs its own start."""

    def report(self, engine_id: str) -> EngineReport:
        last = self._last
        return EngineReport(
            engine_id,
            last.num_running_reqs,
            last.num_waiting_reqs + last.num_skipped_waiting_reqs,
            last.kv_cache_usage,
            self._hits,
            self._queries,
            self._generated,
            self._transferred,
        )


@asynccontextmanager
async def explained_failure(timeout_s: float) -> AsyncIterator[None]:
    """Turn a failed start into one `EngineStartError` that holds the cause.

    vLLM starts its engine core and workers as processes and says only "see root cause above" when one of them fails.
    Ray gives this process's stdout and stderr files of their own; the children write there too: read what was added.
    """
    logs = {path: path.stat().st_size for path in _output_files()}
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise EngineStartError(
            f"the engine was not ready after start_timeout_s={timeout_s:.0f}; raise it if the model is only slow to "
            f"load. Last output:\n{_tail(logs)}"
        ) from error
    except (Exception, SystemExit) as error:
        raise EngineStartError(f"the engine did not start: {_cause(logs) or error!r}") from error


def _output_files() -> set[Path]:
    targets = (Path(os.readlink(f"/proc/self/fd/{number}")) for number in (1, 2))
    return {path for path in targets if path.is_file()}


def _added(logs: dict[Path, int]) -> str:
    text = ""
    for path, start in logs.items():
        with path.open("rb") as file:
            file.seek(start)
            text += file.read().decode(errors="replace")
    return text


def _tail(logs: dict[Path, int], lines: int = 8) -> str:
    return "\n".join(_added(logs).splitlines()[-lines:])


def _cause(logs: dict[Path, int]) -> str | None:
    """The last line of the first traceback that a child printed: the root cause, not what followed from it."""
    pattern = re.compile(r"^(?:\([^)]*\)\s*)?(?:ERROR [^\]]*\]\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b: .+)$")
    for line in _added(logs).splitlines():
        if match := pattern.match(line.strip()):
            return match.group(1)
    return None
