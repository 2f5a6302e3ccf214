"""The client goes away: in every window both engines stop working on its request and their KV is free again.

Read from the engines' own counters.
"""

import time
import uuid

import httpx
import pytest
from ray import serve
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

from app.engines.wire import ADMITTED, EngineCall
from app.serving import MODEL

SLACK_S = 6.0
"""1 s plus one engine step: a chunk of 512 prompt tokens takes 3 s on an idle core and up to 5 s on a shared one."""


def prompt(words):
    """A prompt that no prefix cache knows."""
    return f"{uuid.uuid4()} " + "and the rain kept falling on the tin roof " * (words // 9)


def idle(app):
    reports = [report for name in ("PrefillServer", "DecodeServer") for report in app.reports(name)]
    return all(not report.running and not report.waiting and report.kv_usage == 0 for report in reports), reports


def assert_soon_idle(app):
    deadline = time.monotonic() + SLACK_S
    while not (state := idle(app))[0]:
        assert time.monotonic() < deadline, f"still busy after {SLACK_S} s: {state[1]}"
        time.sleep(0.1)


@pytest.fixture(autouse=True)
def starts_idle(pd):
    deadline = time.monotonic() + 60
    while not idle(pd)[0] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert idle(pd)[0], idle(pd)[1]


def leave_after(app, seconds, body):
    with pytest.raises(httpx.TimeoutException):
        httpx.post(app.url + "/v1/completions", json={"model": MODEL} | body, timeout=httpx.Timeout(30, read=seconds))


@pytest.mark.parametrize("stream", [False, True])
def test_during_prefill(pd, stream):
    leave_after(pd, 1.5, {"prompt": prompt(2500), "max_tokens": 50, "stream": stream})
    assert_soon_idle(pd)


def test_while_waiting_for_prefill(pd):
    with httpx.Client(timeout=httpx.Timeout(30, read=2.5)) as ahead:
        with (
            pytest.raises(httpx.TimeoutException),
            ahead.stream(
                "POST", pd.url + "/v1/completions", json={"model": MODEL, "prompt": prompt(2500), "stream": True}
            ),
        ):
            pass
        leave_after(pd, 0.5, {"prompt": prompt(1000)})
    assert_soon_idle(pd)


@pytest.mark.parametrize("words", [20, 800], ids=["local", "remote"])
def test_during_decode(pd, words):
    body = {"model": MODEL, "prompt": prompt(words), "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", pd.url + "/v1/completions", json=body, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data"))
        for _ in range(3):
            next(lines)
        assert not idle(pd)[0]
    assert_soon_idle(pd)


def test_a_whole_answer_nobody_waits_for_any_more(pd):
    leave_after(pd, 1.5, {"prompt": "Count to a thousand.", "max_tokens": 2000, "ignore_eos": True})
    assert_soon_idle(pd)


def legs(pd):
    prefill = serve.get_deployment_handle("PrefillServer", pd.name)
    decode = serve.get_deployment_handle("DecodeServer", pd.name)
    ids = [(number * 7 + time.time_ns()) % 40000 + 100 for number in range(900)]
    one = SamplingParams(max_tokens=1, temperature=0, output_kind=RequestOutputKind.FINAL_ONLY)
    producing = {"do_remote_decode": True, "do_remote_prefill": False}
    call = EngineCall(uuid.uuid4().hex, tokens_input(ids), one, kv_transfer_params=producing)
    answer = prefill.prefill.remote(call).result()
    assert pd.reports("PrefillServer")[0].kv_usage > 0, "the hand-off is leased"
    many = SamplingParams(max_tokens=2000, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    follow = EngineCall(call.request_id, call.prompt, many, kv_transfer_params=answer.kv_transfer_params)
    return decode, follow


def test_between_the_legs(pd):
    decode, call = legs(pd)
    decode.release.remote(call.request_id, call.kv_transfer_params).result()
    assert_soon_idle(pd)


def test_during_the_kv_pull(pd):
    decode, call = legs(pd)
    stream = decode.options(stream=True).generate.remote(call)
    assert next(stream) == ADMITTED
    stream.cancel()
    assert_soon_idle(pd)


def test_many_clients_leaving_at_any_moment_leave_nothing_behind(pd):
    for number in range(8):
        leave_after(pd, 0.6 + 0.45 * number, {"prompt": prompt(400), "max_tokens": 200, "ignore_eos": True})
    assert_soon_idle(pd)
