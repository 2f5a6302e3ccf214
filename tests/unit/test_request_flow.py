import asyncio

import pytest

from app.config import Kv
from app.engines.wire import ADMITTED, PrefillAnswer
from app.errors import Unavailable
from app.kv.connector import connector_of
from app.router.decision import Decision, Reason, Route
from app.router.fallback import FallbackBudget
from app.router.record import Record
from app.router.request_flow import RequestFlow
from tests.unit.fakes import ANSWER, HANDOFF, FakeGroup, call, chunk


@pytest.fixture(autouse=True)
def no_ray_metrics(monkeypatch):
    class Silent:
        def inc(self, *args, **kwargs):
            pass

    monkeypatch.setattr("app.router.record.requests_total", Silent)
    monkeypatch.setattr("app.router.handoff.handoffs_released_total", Silent)


class Story:
    """One request against two fake groups."""

    def __init__(self, prefill=None, decode=None, route=Route.REMOTE, timeout_s=5.0, fallbacks=1, **params):
        self.prefill, self.decode = prefill or FakeGroup(), decode or FakeGroup()
        self.budget = FallbackBudget(fallbacks)
        self.gone = asyncio.Event()
        self.flow = RequestFlow(self.prefill, self.decode, connector_of(Kv()), timeout_s, self.budget, self.gone)
        reason = Reason.THRESHOLD if route is Route.REMOTE else Reason.BELOW_THRESHOLD
        self.call = call(**params)
        self.record = Record("req-1", 300, Decision(route, reason))

    async def text(self):
        return "".join([output.outputs[0].text async for output in self.flow.run(self.call, self.record)])

    async def cancelled_while(self, ready):
        """Start, wait for `ready()`, take the client away, let the cleaning-up finish."""
        running = asyncio.ensure_future(self.text())
        async with asyncio.timeout(5):
            while not ready():
                await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        for gate in (*self.prefill.gates.values(), *self.decode.gates.values()):
            gate.set()
        async with asyncio.timeout(5):
            await asyncio.gather(*self.flow._background, return_exceptions=True)


async def test_a_remote_request_goes_prefill_then_decode_with_the_same_token_ids():
    story = Story()
    assert await story.text() == "abc"
    (prefill,), (decode,) = story.prefill.calls, story.decode.calls
    assert prefill.prompt is decode.prompt is story.call.prompt
    assert prefill.kv_transfer_params == {"do_remote_decode": True, "do_remote_prefill": False}
    assert decode.kv_transfer_params == HANDOFF, "the prefill answer travels verbatim"
    assert story.decode.released == [] and story.record.output_tokens == 3


async def test_a_local_request_touches_no_prefill_replica():
    story = Story(route=Route.LOCAL)
    assert await story.text() == "abc"
    assert story.prefill.calls == [] and story.decode.calls[0].kv_transfer_params is None


@pytest.mark.parametrize(
    "params",
    [
        {"min_tokens": 3},
        {"n": 3},
        {"logprobs": 5},
        {"stop": ["x"]},
        {"seed": 1, "temperature": 1.0},
        {"max_tokens": 500, "presence_penalty": 1.0},
    ],
)
async def test_the_prefill_leg_samples_one_plain_token_and_the_decode_leg_keeps_the_request(params):
    story = Story(**params)
    await story.text()
    leg, kept = story.prefill.calls[0].params, story.decode.calls[0].params
    assert (leg.max_tokens, leg.min_tokens, leg.n, leg.logprobs, leg.stop) == (1, 0, 1, None, [])
    assert leg.structured_outputs is None and leg.temperature == 0
    assert kept == story.call.params


@pytest.mark.parametrize(
    "answer",
    [
        None,
        RuntimeError("replica died"),
        PrefillAnswer({}, 0),
        PrefillAnswer(HANDOFF | {"remote_block_ids": []}, 0),
        PrefillAnswer(HANDOFF | {"remote_block_ids": [[]]}, 0),
        PrefillAnswer({name: value for name, value in HANDOFF.items() if name != "remote_port"}, 0),
        PrefillAnswer(HANDOFF | {"do_remote_prefill": False}, 0),
    ],
)
async def test_a_prefill_without_a_usable_hand_off_falls_back_to_the_decode_replica(answer):
    story = Story(prefill=FakeGroup(answer=answer))
    assert await story.text() == "abc"
    assert story.record.decision == Decision(Route.LOCAL, Reason.PREFILL_FAILED)
    assert story.decode.calls[0].kv_transfer_params is None


async def test_past_the_budget_a_fallback_is_refused():
    story = Story(prefill=FakeGroup(answer=None), fallbacks=0)
    with pytest.raises(Unavailable, match="fallbacks"):
        await story.text()
    assert story.decode.calls == []


async def test_the_fallback_budget_is_given_back_at_the_first_token():
    story = Story(prefill=FakeGroup(answer=None))
    outputs = story.flow.run(story.call, story.record)
    await anext(outputs)
    assert story.budget.taken == 0
    await outputs.aclose()


async def test_a_slow_prefill_is_cancelled_at_its_deadline_and_the_request_served_locally():
    story = Story(prefill=FakeGroup(gates={"prefill": asyncio.Event()}, stops=True), timeout_s=0.01)
    assert await story.text() == "abc"
    await asyncio.gather(*story.flow._background)
    assert story.prefill.legs[0].cancelled and story.record.decision.reason is Reason.PREFILL_FAILED


async def test_a_request_that_waits_while_the_last_prefill_replica_dies_is_served_locally():
    story = Story(prefill=FakeGroup(gates={"prefill": asyncio.Event()}, stops=True))
    asyncio.get_running_loop().call_later(0.01, story.gone.set)
    assert await story.text() == "abc"
    assert story.record.decision.reason is Reason.PREFILL_FAILED


async def test_kv_that_cannot_be_loaded_is_computed_by_the_decode_replica_once():
    decode = FakeGroup(scripts=[[ADMITTED, chunk("", finish="error")], list(ANSWER)])
    story = Story(decode=decode)
    assert await story.text() == "abc"
    assert story.record.decision.reason is Reason.KV_TRANSFER_FAILED
    assert decode.calls[1].kv_transfer_params is None


async def test_a_decode_replica_that_never_admits_gives_the_hand_off_back():
    decode = FakeGroup(scripts=[[ConnectionError("died")], list(ANSWER)])
    story = Story(decode=decode)
    assert await story.text() == "abc"
    assert decode.released == [HANDOFF]


async def test_nothing_is_retried_after_the_first_token():
    decode = FakeGroup(scripts=[[ADMITTED, chunk("a"), ConnectionError("died")]])
    story = Story(decode=decode)
    with pytest.raises(ConnectionError):
        await story.text()
    assert len(decode.calls) == 1


async def test_a_stream_that_ends_early_is_an_error_not_an_answer():
    story = Story(decode=FakeGroup(scripts=[[ADMITTED, chunk("a")]]))
    with pytest.raises(RuntimeError, match="before its last token"):
        await story.text()


async def test_client_gone_during_prefill_stops_the_prefill():
    story = Story(prefill=FakeGroup(gates={"prefill": asyncio.Event()}, stops=True))
    await story.cancelled_while(lambda: story.prefill.legs)
    assert story.prefill.legs[0].cancelled and story.decode.calls == [] and story.decode.released == []


async def test_client_gone_while_the_prefill_answer_is_on_its_way_gives_the_kv_back():
    story = Story(prefill=FakeGroup(gates={"prefill": asyncio.Event()}))
    await story.cancelled_while(lambda: story.prefill.legs)
    assert story.decode.released == [HANDOFF] and story.decode.calls == []


async def test_client_gone_before_the_decode_engine_admits_lets_it_admit_and_stops_it():
    story = Story(decode=FakeGroup(gates={"admission": asyncio.Event()}))
    await story.cancelled_while(lambda: story.decode.legs)
    assert story.decode.legs[0].cancelled and story.decode.released == [], "the engine frees what it owns"


async def test_client_gone_before_a_dying_decode_engine_admits_gives_the_kv_back_once():
    decode = FakeGroup(scripts=[[ConnectionError("died")]], gates={"admission": asyncio.Event()})
    story = Story(decode=decode)
    await story.cancelled_while(lambda: decode.legs)
    assert decode.legs[0].cancelled and decode.released == [HANDOFF]


async def test_client_gone_during_the_pull_or_decode_stops_the_decode():
    story = Story(decode=FakeGroup(gates={"decode": asyncio.Event()}))
    await story.cancelled_while(lambda: story.decode.legs and len(story.decode.legs[0].items) == 3)
    assert story.decode.legs[0].cancelled and story.decode.released == []


async def test_a_consumer_that_closes_the_stream_early_stops_the_decode():
    story = Story()
    outputs = story.flow.run(story.call, story.record)
    await anext(outputs)
    await outputs.aclose()
    assert story.decode.legs[0].cancelled


async def test_an_orphan_is_released():
    story = Story()
    story.flow.give_back(dict(HANDOFF))
    await asyncio.gather(*story.flow._background)
    assert story.decode.released == [HANDOFF]
