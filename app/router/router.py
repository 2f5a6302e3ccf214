"""The Router deployment: vLLM's OpenAI application for HTTP, typed methods for Python handles, over the same engine."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any, TypedDict

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GracefulHTTPError, VLLMError
from vllm.inputs import EngineInput, tokens_input
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind, SamplingParams

from app import vllm_args
from app.config import AppConfig
from app.errors import RequestRefused
from app.kv.connector import connector_of
from app.router.decision import Policy
from app.router.engine_client import DisaggregatedEngine, shape_of, without_foreign
from app.router.fallback import FallbackBudget
from app.router.http import ExplainedResponses, build_http
from app.router.legs import ServeGroup
from app.router.pool import Pool
from app.router.record import Record, records, summary
from app.router.request_flow import RequestFlow


class RouteAnswer(TypedDict):
    """What `route` says of one prompt."""

    route: str
    reason: str
    prompt_tokens: int
    threshold_tokens: int


class Generated(TypedDict):
    """What `generate` gives: the whole answer, or what was added since the last one."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    route: str
    reason: str


class RouterServer:
    """One endpoint before the two groups. Stateless: any number of replicas may run side by side."""

    async def __init__(  # type: ignore[misc]
        self, config: AppConfig, decode: DeploymentHandle[Any], prefill: DeploymentHandle[Any] | None
    ) -> None:
        disaggregated = config.mode == "disaggregated"
        budget = FallbackBudget(config.routing.fallback.max_concurrent)
        decode_group = ServeGroup(decode)
        prefill_group = ServeGroup(prefill) if prefill else None
        gone = {"prefill": asyncio.Event(), "decode": asyncio.Event()}
        flow = RequestFlow(
            prefill_group,
            decode_group,
            connector_of(config.kv) if disaggregated else None,
            config.routing.prefill_timeout_s,
            budget,
            gone["prefill"],
        )
        interval = config.router.health_interval_s
        pools = {
            name: Pool(name, group, interval, flow.give_back, gone[name])
            for name, group in (("prefill", prefill_group), ("decode", decode_group))
            if group
        }
        self.engine = DisaggregatedEngine(
            vllm_args.router_config(config),
            flow,
            Policy(disaggregated, config.routing.threshold_tokens),
            pools.get("prefill"),
            pools["decode"],
            budget,
        )
        self.http = await build_http(self.engine, vllm_args.server_namespace(config))
        await asyncio.gather(*(pool.look() for pool in pools.values()))
        self._watching = [asyncio.ensure_future(pool.watch()) for pool in pools.values()]

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return ExplainedResponses(self.http)

    async def chat(self, request: dict[str, Any]) -> dict[str, Any] | AsyncIterator[dict[str, Any]]:
        """An OpenAI chat completion, as `POST /v1/chat/completions` takes and gives it.

        With `"stream": True` call it through `handle.options(stream=True)`: it gives the chunks.

        Raises:
            RequestRefused: with the status and error body that HTTP would have had.
        """
        serving = self.http.state.openai_serving_chat
        return await answer(lambda: serving.create_chat_completion(ChatCompletionRequest.model_validate(request), None))

    async def completions(self, request: dict[str, Any]) -> dict[str, Any] | AsyncIterator[dict[str, Any]]:
        """An OpenAI completion, as `POST /v1/completions` takes and gives it; see `chat`."""
        serving = self.http.state.openai_serving_completion
        return await answer(lambda: serving.create_completion(CompletionRequest.model_validate(request), None))

    async def generate(
        self, prompt: str | list[int], params: dict[str, Any] | None = None, stream: bool = False
    ) -> Generated | AsyncIterator[Generated]:
        """Generate from text or token ids; `params` are the fields of vLLM's `SamplingParams`.

        With `stream=True` call it through `handle.options(stream=True)`: it gives what was added, piece by piece.

        Raises:
            RequestRefused: the prompt or the parameters cannot be served.
        """
        kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        gathered: list[Record] = []
        with refusals():
            sampling = SamplingParams(**{**(params or {}), "output_kind": kind})
            token = records.set(gathered)
            outputs = self.engine.generate(self._rendered(prompt), sampling, f"generate-{uuid.uuid4().hex}")
            records.reset(token)
        pieces = generated(outputs, gathered)
        if stream:
            return pieces
        with refusals():
            return [piece async for piece in pieces][-1]

    async def route(self, request: dict[str, Any]) -> list[RouteAnswer]:
        """The decision for a chat (`messages`) or completion (`prompt`) request, one per prompt; nothing is run.

        Raises:
            RequestRefused: the request cannot be served.
        """
        with refusals():
            parsed, inputs = await self._render(request)
            answers = []
            for prompt in inputs:
                params = without_foreign(parsed.to_sampling_params(1, {}), "route")
                processed = self.engine.process(prompt, params, "route")
                decision = self.engine.decide(shape_of(processed, prompt, params))
                answers.append(
                    RouteAnswer(
                        route=decision.route.value,
                        reason=decision.reason.value,
                        prompt_tokens=len(processed.prompt_token_ids or ()),
                        threshold_tokens=self.engine.policy.threshold_tokens,
                    )
                )
        return answers

    async def _render(self, request: dict[str, Any]) -> tuple[Any, list[EngineInput]]:
        if "messages" in request:
            chat = ChatCompletionRequest.model_validate(request)
            rendered = await self.http.state.openai_serving_chat.render_chat_request(chat)
            return chat, accepted(rendered)[1]
        completion = CompletionRequest.model_validate(request)
        rendered = await self.http.state.openai_serving_completion.render_completion_request(completion)
        return completion, accepted(rendered)

    def _rendered(self, prompt: str | list[int]) -> EngineInput:
        if not isinstance(prompt, str):
            return tokens_input(list(prompt))
        renderer = self.engine.renderer
        (rendered,) = renderer.render_cmpl(
            [parse_model_prompt(self.engine.model_config, prompt)], renderer.default_cmpl_tok_params
        )
        return rendered


# Applied here and not as decorators: the plain class keeps its name, so replicas import it instead of unpickling it.
Router: serve.Deployment = serve.deployment(name="Router")(serve.ingress()(RouterServer))


class refusals:
    """Turns what vLLM's HTTP layer would answer with an error body into `RequestRefused`."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # pydantic's validation error is a ValueError, as are vLLM's older checks.
        if isinstance(error, (VLLMError, GracefulHTTPError, ValueError, TypeError)):
            refuse(create_error_response(error), error)


def refuse(response: ErrorResponse, cause: BaseException | None = None) -> None:
    """Raise `RequestRefused` for an error response."""
    raise RequestRefused(response.error.code, response.model_dump()) from cause


def accepted(result: Any) -> Any:
    """`result`, unless it is an error response."""
    if isinstance(result, ErrorResponse):
        refuse(result)
    return result


async def answer(call: Any) -> dict[str, Any] | AsyncIterator[dict[str, Any]]:
    """Run one of vLLM's serving calls: its response as a dictionary, or its stream as dictionaries."""
    gathered: list[Record] = []
    # Set for this task and what it starts; a handle call has a task of its own.
    records.set(gathered)
    with refusals():
        result = accepted(await call())
    if hasattr(result, "__aiter__"):
        return events(result, gathered)
    return explained(result.model_dump(), gathered)


async def events(lines: AsyncIterator[str], gathered: list[Record]) -> AsyncIterator[dict[str, Any]]:
    """The data of server-sent events.

    Raises:
        RequestRefused: when an event is an error.
    """
    try:
        async for line in lines:
            data = line.removeprefix("data: ").strip()
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise RequestRefused(event["error"]["code"], event)
            yield explained(event, gathered)
    finally:
        await lines.aclose()  # type: ignore[attr-defined]


def explained(body: dict[str, Any], gathered: list[Record]) -> dict[str, Any]:
    """The body with `pd_route` and `pd_reason`: a handle call has no headers."""
    if how := summary(gathered):
        body["pd_route"], body["pd_reason"] = how
    return body


async def generated(outputs: Any, gathered: list[Record]) -> AsyncIterator[Generated]:
    """`Generated` pieces of an engine's outputs."""
    try:
        async for output in outputs:
            (piece,) = output.outputs
            decision = gathered[0].decision
            yield Generated(
                text=piece.text,
                token_ids=list(piece.token_ids),
                finish_reason=piece.finish_reason,
                route=decision.route.value,
                reason=decision.reason.value,
            )
    finally:
        await outputs.aclose()
