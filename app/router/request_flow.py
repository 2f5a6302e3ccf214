"""One request's way through the two groups: prefill leg, hand-off, decode leg, fallback, and what a cancellation does.

Plain asyncio over the `Group` protocol, so that the whole story runs in tests without Ray. Invariants: the same token
ids go to both legs; whatever was taken is given back on every path; nothing is retried after the first token.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import ExitStack, aclosing
from dataclasses import replace
from typing import Any

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from app.engines.wire import ADMITTED, EngineCall, PrefillAnswer, decode_chunk
from app.errors import DecodeError, PrefillError
from app.kv.connector import Connector
from app.router.decision import Reason, Route, is_fallback
from app.router.fallback import FallbackBudget
from app.router.handoff import Handoff
from app.router.legs import DecodeLeg, Group, PrefillLeg
from app.router.record import Record

logger = logging.getLogger("ray.serve")

SETTLE_S = 10.0
"""Seconds that a cancelled leg may take to say where its KV is before the prefill engine's lease is left to end."""


def prefill_params() -> SamplingParams:
    """What the prefill leg samples with: one token that nobody reads.

    Everything that shapes the answer (`n`, `min_tokens`, stop strings, logprobs, penalties, structured output, seed)
    stays with the decode leg, which computes the prompt's last token itself and samples from there.
    """
    return SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)


class RequestFlow:
    """Runs requests against a prefill and a decode group."""

    def __init__(
        self,
        prefill: Group | None,
        decode: Group,
        connector: Connector | None,
        prefill_timeout_s: float,
        budget: FallbackBudget,
        prefill_gone: asyncio.Event,
    ) -> None:
        self._prefill_group = prefill
        self._decode_group = decode
        self._connector = connector
        self._prefill_timeout_s = prefill_timeout_s
        self._budget = budget
        self._prefill_gone = prefill_gone
        self._background: set[asyncio.Task[None]] = set()

    async def run(self, call: EngineCall, record: Record) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request, as `AsyncLLM.generate` would give them."""
        outcome = "cancelled"
        try:
            async with aclosing(self._outputs(call, record)) as outputs:
                async for output in outputs:
                    count(output, call.params.output_kind, record)
                    yield output
            outcome = "finished"
        except Exception:
            outcome = "error"
            raise
        finally:
            record.finish(outcome)

    def give_back(self, params: dict[str, Any]) -> None:
        """Release the KV of a hand-off whose request is gone (an orphan)."""
        handoff = Handoff(params["remote_request_id"], params, self._decode_group.release)
        self._in_background(handoff.give_back("orphan"))

    async def _outputs(self, call: EngineCall, record: Record) -> AsyncGenerator[RequestOutput, None]:
        if record.decision.route is Route.REMOTE:
            try:
                handoff = await self._prefill(call, record)
            except PrefillError as error:
                self._fall_back(record, Reason.PREFILL_FAILED, error)
            else:
                try:
                    async with aclosing(self._decode(call, handoff)) as outputs:
                        async for output in outputs:
                            yield output
                    return
                except DecodeError as error:
                    self._fall_back(record, Reason.KV_TRANSFER_FAILED, error)
        with ExitStack() as fallback:
            if is_fallback(record.decision.reason):
                fallback.enter_context(self._budget.take(record.decision.reason))
            async with aclosing(self._decode(call, None)) as outputs:
                async for output in outputs:
                    # From the first token on the prompt costs the decode group nothing more.
                    fallback.close()
                    yield output

    def _fall_back(self, record: Record, reason: Reason, error: Exception) -> None:
        logger.warning("fallback request_id=%s reason=%s error=%s", record.request_id, reason, error)
        record.reroute(reason)

    async def _prefill(self, call: EngineCall, record: Record) -> Handoff:
        """The prefill leg, within its deadline.

        Raises:
            PrefillError: there is no hand-off, and no KV is left behind.
        """
        assert self._prefill_group is not None and self._connector is not None
        started = time.perf_counter()
        leg = self._prefill_group.prefill(
            replace(
                call,
                params=prefill_params(),
                kv_transfer_params=self._connector.prefill_params(),
                options={name: call.options[name] for name in ("lora_request",) if name in call.options},
            )
        )
        answering = asyncio.ensure_future(leg.answer())
        # Serve lets a call wait for a new replica when the last one died: somebody's prompt should not.
        gone = asyncio.ensure_future(self._prefill_gone.wait())
        try:
            await asyncio.wait({answering, gone}, timeout=self._prefill_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not answering.done():
                self._in_background(self._stop_prefill(call, leg, answering))
        if not answering.done():
            why = "no prefill replica is alive" if self._prefill_gone.is_set() else "deadline"
            raise PrefillError(f"no answer within prefill_timeout_s={self._prefill_timeout_s:g}: {why}")
        try:
            answer = answering.result()
        except Exception as error:
            raise PrefillError(f"{type(error).__name__}: {error}") from error
        record.prefill_s = time.perf_counter() - started
        return self._handoff(call, answer)

    def _handoff(self, call: EngineCall, answer: PrefillAnswer | None) -> Handoff:
        assert self._connector is not None
        params = self._connector.decode_params(answer.kv_transfer_params if answer else None)
        return Handoff(call.request_id, params, self._decode_group.release)

    async def _stop_prefill(
        self, call: EngineCall, leg: PrefillLeg, answering: asyncio.Future[PrefillAnswer | None]
    ) -> None:
        """Cancel the prefill leg; if its answer was already on the way, give that back."""
        leg.cancel()
        try:
            answer = await asyncio.wait_for(answering, SETTLE_S)
            await self._handoff(call, answer).give_back("cancelled_after_prefill")
        except (Exception, asyncio.CancelledError) as gone:
            # The usual case: the replica stopped, and what it had finished by then comes back as an orphan.
            logger.debug("prefill_stopped request_id=%s how=%r", call.request_id, gone)

    async def _decode(self, call: EngineCall, handoff: Handoff | None) -> AsyncGenerator[RequestOutput, None]:
        """The decode leg.

        Raises:
            DecodeError: it failed before its first token, and `handoff` was given.
        """
        if handoff is None:
            leg = self._decode_group.decode(call)
        else:
            leg = self._decode_group.decode(replace(call, kv_transfer_params=handoff.params))
            await self._admission(leg, handoff)
        finished = started = False
        try:
            while not finished:
                output = decode_chunk(await leg.next(), call)
                finished = output.finished
                if handoff is not None and not started and failed(output):
                    raise DecodeError("the decode engine could not load the KV")
                started = True
                yield output
        except StopAsyncIteration:
            finished = True
            raise RuntimeError(f"the decode replica ended request {call.request_id} before its last token") from None
        finally:
            if not finished:
                leg.cancel()

    async def _admission(self, leg: DecodeLeg, handoff: Handoff) -> None:
        """Wait until the decode engine owns the hand-off; a cancellation lets it own it first, then stops it."""
        admitting = asyncio.ensure_future(leg.next())
        try:
            item = await asyncio.shield(admitting)
        except asyncio.CancelledError:
            self._in_background(self._stop_admission(leg, admitting, handoff))
            raise
        except Exception as error:
            leg.cancel()
            await handoff.give_back("decode_did_not_admit")
            raise DecodeError(f"{type(error).__name__}: {error}") from error
        assert item == ADMITTED, item
        handoff.admitted()

    async def _stop_admission(self, leg: DecodeLeg, admitting: asyncio.Future[bytes], handoff: Handoff) -> None:
        try:
            await asyncio.wait_for(admitting, SETTLE_S)
            handoff.admitted()
        except (Exception, asyncio.CancelledError) as error:
            logger.debug("decode_not_admitted request_id=%s error=%r", handoff.request_id, error)
        finally:
            leg.cancel()
            await handoff.give_back("cancelled_before_decode")

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run cleaning-up work that must outlive the cancelled request."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def failed(output: RequestOutput) -> bool:
    """Whether the engine ended the request with an internal error."""
    return any(piece.finish_reason == "error" for piece in output.outputs)


def count(output: RequestOutput, kind: RequestOutputKind, record: Record) -> None:
    """Add an output to its record."""
    tokens = sum(len(piece.token_ids) for piece in output.outputs)
    record.output_tokens = record.output_tokens + tokens if kind is RequestOutputKind.DELTA else tokens
    if output.num_cached_tokens is not None:
        record.cached_tokens = output.num_cached_tokens
