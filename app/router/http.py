"""The HTTP side: vLLM's own OpenAI application, a truthful /health, and the headers that say how a request went."""

import json
from argparse import Namespace
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.serve import create_error_response

from app.router.engine_client import TASKS, DisaggregatedEngine
from app.router.record import Record, records, summary

ROUTE_HEADER = "x-pd-route"
REASON_HEADER = "x-pd-reason"
RETRY_AFTER_S = "1"
NOT_OFFERED = (
    "/v1/embeddings",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/audio/speech",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/moderations",
    "/v1/rerank",
    "/v1/score",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
)


async def build_http(engine: DisaggregatedEngine, args: Namespace) -> FastAPI:
    """vLLM's application over `engine`; serve it through `ExplainedResponses`."""
    app = build_app(args, TASKS, engine.model_config)
    await init_app_state(engine, app.state, args, TASKS)

    async def health() -> JSONResponse:
        reason = engine.unhealthy()
        return JSONResponse({"status": reason or "ok"}, status_code=503 if reason else 200)

    async def not_offered() -> JSONResponse:
        error = create_error_response(
            "This endpoint generates text: see /docs for what it offers.",
            "NotImplementedError",
            HTTPStatus.NOT_IMPLEMENTED,
        )
        return JSONResponse(error.model_dump(), status_code=501)

    app.add_api_route("/health", health, methods=["GET"])
    # vLLM's own /health knows no reason; the first route that matches answers.
    app.router.routes.insert(0, app.router.routes.pop())
    for path in NOT_OFFERED:
        app.add_api_route(path, not_offered, methods=["GET", "POST"], include_in_schema=False)
    return app


class ExplainedResponses:
    """Adds route and reason to every response that an engine had part in.

    The response's start is held back until its first body, so that the headers tell what happened and not what was
    planned, and a stream that fails before its first token gets the status it deserves instead of a 200.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gathered: list[Record] = []
        token = records.set(gathered)
        try:
            await self._app(scope, receive, HeldStart(send, gathered))
        finally:
            records.reset(token)


class HeldStart:
    """An ASGI `send` that keeps `http.response.start` until the first body message."""

    def __init__(self, send: Send, gathered: list[Record]) -> None:
        self._send = send
        self._gathered = gathered
        self._start: Message | None = None
        self._closed = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        if self._closed:
            return
        if self._start is not None and message["type"] == "http.response.body":
            start, self._start = self._start, None
            if error := failed_stream(start, message):
                self._closed = True
                message = {"type": "http.response.body", "body": json.dumps(error).encode()}
                start["status"] = error["error"]["code"]
                start["headers"] = [(b"content-type", b"application/json")]
            self._explain(start)
            await self._send(start)
        await self._send(message)

    def _explain(self, start: Message) -> None:
        headers = MutableHeaders(scope=start)
        if how := summary(self._gathered):
            headers[ROUTE_HEADER], headers[REASON_HEADER] = how
        if start["status"] == 503:
            headers["retry-after"] = RETRY_AFTER_S


def failed_stream(start: Message, first: Message) -> dict[str, Any] | None:
    """The OpenAI error that a stream's first event holds, if it does."""
    body: bytes = first.get("body", b"")
    if start["status"] != 200 or not body.startswith(b'data: {"error"'):
        return None
    event: dict[str, Any] = json.loads(body.split(b"\n\n", 1)[0].removeprefix(b"data: "))
    return event
