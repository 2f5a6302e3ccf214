"""`DisaggregatedEngine`: vLLM's `EngineClient` over two groups of engines.

vLLM's OpenAI server calls `generate` as if one engine were behind it. The decision is taken when `generate` is called,
not when its first output is awaited, so that a refused request becomes an HTTP status and not an event in a stream.
Interface: vLLM 0.32.0, `vllm/engine/protocol.py`.
"""

import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, NoReturn

from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.inputs import EngineInput
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.renderers import renderer_from_config
from vllm.sampling_params import SamplingParams
from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor

from app.engines.wire import EngineCall
from app.errors import Unavailable
from app.router.decision import Decision, Policy, Reason, Shape, decide, is_fallback
from app.router.fallback import FallbackBudget
from app.router.pool import Pool
from app.router.record import Record, records
from app.router.request_flow import RequestFlow

logger = logging.getLogger("ray.serve")

TASKS: tuple[SupportedTask, ...] = ("generate",)
FOREIGN = ("kv_transfer_params", "ec_transfer_params")
"""What a client may not hand to an engine: it would read another tenant's KV, or crash the engine."""


class DisaggregatedEngine(EngineClient):
    """Renders and tokenizes here, decides, and lets `RequestFlow` run the request."""

    def __init__(
        self, vllm_config: VllmConfig, flow: RequestFlow, policy: Policy, prefill: Pool | None, decode: Pool,
        budget: FallbackBudget,
    ) -> None:  # fmt: skip
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.renderer = renderer_from_config(vllm_config)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self.flow = flow
        self.policy = policy
        self.prefill = prefill
        self.decode = decode
        self.budget = budget

    def generate(  # type: ignore[override]
        self,
        prompt: EngineInput,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        **_: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Check, decide and start one request. See `AsyncLLM.generate` for the arguments.

        Session ids, KV hints and data-parallel ranks are not passed on: replicas are chosen here.

        Raises:
            VLLMValidationError: the request cannot be served (4xx); no engine has seen it.
            Unavailable: no replica can serve it now (503).
        """
        params = without_foreign(sampling_params, request_id)
        request = self.process(prompt, params, request_id, lora_request, priority)
        decision = self.decide(shape_of(request, prompt, params))
        self.check_decision(decision)
        options = {
            "lora_request": lora_request,
            "trace_headers": trace_headers,
            "reasoning_ended": reasoning_ended,
            "reasoning_parser_kwargs": reasoning_parser_kwargs,
        }
        call = EngineCall(
            request_id,
            prompt,
            params,
            priority,
            options={name: value for name, value in options.items() if value is not None},
        )
        record = Record(request_id, len(request.prompt_token_ids or ()), decision)
        if (gathered := records.get()) is not None:
            gathered.append(record)
        return self.flow.run(call, record)

    def process(
        self,
        prompt: EngineInput,
        params: SamplingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> EngineCoreRequest:
        """vLLM's own checks of a rendered prompt and its parameters."""
        return self.input_processor.process_inputs(
            request_id, prompt, params, TASKS, lora_request=lora_request, priority=priority
        )

    def decide(self, shape: Shape) -> Decision:
        """The decision as it would be taken now."""
        return decide(shape, self.policy, prefill_alive=bool(self.prefill and self.prefill.alive))

    def check_decision(self, decision: Decision) -> None:
        """Raise `Unavailable` when the decision cannot be carried out."""
        if not self.decode.alive:
            raise Unavailable(f"No decode replica is alive: {self.decode.trouble}.")
        if decision.reason is Reason.NO_PREFILL_REPLICA and self.policy.threshold_tokens == 0:
            assert self.prefill is not None
            raise Unavailable(f"No prefill replica is alive: {self.prefill.trouble}.")
        if is_fallback(decision.reason):
            self.budget.check(decision.reason)

    def unhealthy(self) -> str | None:
        """Why requests cannot be served now; None while they can."""
        if not self.decode.alive:
            return f"no decode replica is alive: {self.decode.trouble}"
        if self.prefill is not None and self.policy.threshold_tokens == 0 and not self.prefill.alive:
            return f"no prefill replica is alive: {self.prefill.trouble}"
        return None

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        if not self.decode.alive:
            raise Unavailable(f"No decode replica is alive: {self.decode.trouble}.")

    async def check_health(self) -> None:
        if self.unhealthy():
            raise EngineDeadError

    @property
    def is_running(self) -> bool:
        return True

    @property
    def is_stopped(self) -> bool:
        return False

    @property
    def errored(self) -> bool:
        return False

    @property
    def dead_error(self) -> BaseException:
        return EngineDeadError()

    async def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return TASKS

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None:
        """Engines log their own statistics."""

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Requests end with their generators; there is nothing to abort by name."""

    async def notify_kv_transfer_request_rejected(self, *_: Any, **__: Any) -> None:
        """Never needed: clients' `kv_transfer_params` do not reach an engine."""

    def shutdown(self, timeout: float | None = None) -> None:
        self.renderer.shutdown()

    def encode(self, *_: Any, **__: Any) -> AsyncGenerator[PoolingRequestOutput, None]:
        self._unsupported("encode")

    async def start_profile(self, *_: Any, **__: Any) -> None:
        self._unsupported("start_profile")

    async def stop_profile(self) -> None:
        self._unsupported("stop_profile")

    async def reset_mm_cache(self) -> None:
        await self.renderer.clear_mm_cache_async()

    async def reset_encoder_cache(self) -> None:
        self._unsupported("reset_encoder_cache")

    async def reset_prefix_cache(self, *_: Any, **__: Any) -> bool:
        self._unsupported("reset_prefix_cache")

    async def sleep(self, *_: Any, **__: Any) -> None:
        self._unsupported("sleep")

    async def release_kv_cache_memory(self) -> None:
        self._unsupported("release_kv_cache_memory")

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        self._unsupported("wake_up")

    async def is_sleeping(self) -> bool:
        return False

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        self._unsupported("add_lora")

    async def pause_generation(self, *_: Any, **__: Any) -> None:
        self._unsupported("pause_generation")

    async def resume_generation(self) -> None:
        self._unsupported("resume_generation")

    async def is_paused(self) -> bool:
        return False

    def _unsupported(self, what: str) -> NoReturn:
        raise NotImplementedError(f"{what} is not offered: this endpoint stands before groups of engines, not one")


def without_foreign(params: SamplingParams, request_id: str) -> SamplingParams:
    """The parameters less what a client may not hand to an engine, whichever request field it came by."""
    found = [name for name in FOREIGN if name in (params.extra_args or {})]
    if not found:
        return params
    logger.warning("dropped_from_request request_id=%s fields=%s", request_id, ",".join(found))
    params = params.clone()
    params.extra_args = {name: value for name, value in (params.extra_args or {}).items() if name not in FOREIGN}
    return params


def shape_of(request: EngineCoreRequest, prompt: EngineInput, params: SamplingParams) -> Shape:
    """What of a checked request matters to the decision."""
    return Shape(
        prompt_tokens=len(request.prompt_token_ids or ()),
        sequences=params.n,
        prompt_logprobs=params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None,
        # vLLM's beam search (entrypoints/generate/beam_search/online.py) names its steps so.
        beam_search="-beam-" in request.request_id,
        only_tokens=prompt["type"] == "token" and request.prompt_embeds is None,
    )
