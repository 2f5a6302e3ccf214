"""vLLM's own OpenAI server in one process over the simulated engine: the baseline of `scripts/bench overhead`.

No Ray, no router, no hop: the same HTTP application, the same engine, the same rendering.
"""

from collections.abc import AsyncGenerator
from typing import Any

import typer
import uvicorn
from vllm.inputs import EngineInput
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from app import vllm_args
from app.config import AppConfig, load
from app.engines.simulated import SimulatedEngine
from app.engines.wire import EngineCall
from app.router.engine_client import DisaggregatedEngine
from app.router.http import build_http
from app.serving import EMBEDDED, merged


class BareEngine(DisaggregatedEngine):
    """One simulated engine in this process, called the way vLLM's server calls `AsyncLLM`."""

    def __init__(self, config: AppConfig) -> None:
        super().__init__(vllm_args.router_config(config), None, None, None, None, None)  # type: ignore[arg-type]
        self.simulated = SimulatedEngine(config, "bare")

    async def generate(  # type: ignore[override]
        self, prompt: EngineInput, sampling_params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        self.process(prompt, sampling_params, request_id)
        stream = await self.simulated.add(EngineCall(request_id, prompt, sampling_params))
        try:
            while (output := await stream.next()) is not None:
                yield output
        finally:
            await stream.abort()

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Everything is admitted."""

    def unhealthy(self) -> str | None:
        return None


async def serve(port: int, itl_ms: float) -> None:
    """Serve until stopped."""
    config = load(merged(EMBEDDED, {"engine": "simulated", "mode": "colocated", "simulated": {"itl_ms": itl_ms}}))
    app = await build_http(BareEngine(config), vllm_args.server_namespace(config))
    await uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", access_log=False)).serve()


def main(port: int, itl_ms: float) -> None:
    """`python -m app.bench.bare PORT ITL_MS`"""
    import uvloop

    uvloop.run(serve(port, itl_ms))


if __name__ == "__main__":
    typer.run(main)
