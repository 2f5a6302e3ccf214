"""The same answer whatever route a request took: every request shape, remote and local, against a colocated engine."""

import httpx
import pytest

from app.serving import MODEL

LONG = "The old lighthouse keeper wrote down what the sea had brought that day. " * 40
SHORT = "The capital of France is"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}

COMPLETIONS = {
    "plain": {},
    "one token": {"max_tokens": 1},
    "min_tokens": {"min_tokens": 10, "max_tokens": 12},
    "stop string": {"stop": [" the", "."]},
    "stop string kept": {"stop": [" the"], "include_stop_str_in_output": True},
    "logprobs": {"logprobs": 3},
    "seed": {"seed": 7, "temperature": 1.0},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "logit bias": {"logit_bias": {"28": -100}},
    "token ids back": {"return_token_ids": True},
    "priority": {"priority": 0},
    "salt": {"cache_salt": "tenant"},
    "json": {"structured_outputs": {"json": SCHEMA}, "max_tokens": 24},
    "choice": {"structured_outputs": {"choice": ["red", "green"]}},
    "echo": {"echo": True},
}
LOCAL_COMPLETIONS = {
    "several sequences": ({"n": 2, "seed": 3, "temperature": 1.0}, "several_sequences"),
    "prompt logprobs": ({"prompt_logprobs": 1}, "prompt_logprobs"),
    "echo with logprobs": ({"echo": True, "logprobs": 1}, "prompt_logprobs"),
    "beam search": ({"use_beam_search": True, "n": 2, "max_tokens": 3}, "beam_search"),
}
CHATS = {
    "plain": {},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}}},
    "tools": {"tools": [TOOL], "tool_choice": "auto"},
    "forced tool": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    "usage": {"stream_options": {"include_usage": True}},
}


def post(app, path, body):
    response = httpx.post(
        f"{app.url}/v1/{path}", json={"model": MODEL, "temperature": 0, "max_tokens": 8} | body, timeout=180
    )
    assert response.status_code == 200, response.text
    return response


def answer(response):
    """What must not depend on the route."""
    body = response.json()
    for choice in body["choices"]:
        for call in (choice.get("message") or {}).get("tool_calls") or []:
            call.pop("id")
        without_floats(choice)
    return body["choices"], body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]


def without_floats(value):
    """Logprobs differ in their last bits with the order of additions."""
    if isinstance(value, dict):
        for name, item in value.items():
            value[name] = round(item, 2) if isinstance(item, float) else without_floats(item)
    elif isinstance(value, list):
        value[:] = [round(item, 2) if isinstance(item, float) else without_floats(item) for item in value]
    return value


@pytest.mark.parametrize("shape", COMPLETIONS)
def test_a_long_completion_goes_remote_and_answers_as_the_colocated_engine(pd, colocated, shape):
    body = {"prompt": LONG} | COMPLETIONS[shape]
    response = post(pd, "completions", body)
    assert (response.headers["x-pd-route"], response.headers["x-pd-reason"]) == (
        "remote",
        "prompt_at_or_above_threshold",
    )
    assert answer(response) == answer(post(colocated, "completions", body))


@pytest.mark.parametrize("shape", LOCAL_COMPLETIONS)
def test_a_shape_that_no_hand_off_can_carry_is_served_locally_with_its_reason(pd, colocated, shape):
    fields, reason = LOCAL_COMPLETIONS[shape]
    response = post(pd, "completions", {"prompt": LONG} | fields)
    assert set(response.headers["x-pd-route"].split(",")) == {"local"}
    assert set(response.headers["x-pd-reason"].split(",")) == {reason}
    assert answer(response) == answer(post(colocated, "completions", {"prompt": LONG} | fields))


@pytest.mark.parametrize("shape", CHATS)
def test_a_long_chat_goes_remote_and_answers_as_the_colocated_engine(pd, colocated, shape):
    fields = CHATS[shape]
    body = {"messages": [{"role": "user", "content": LONG}]} | fields
    if "stream_options" in fields:
        del body["stream_options"]
    response = post(pd, "chat/completions", body)
    assert response.headers["x-pd-route"] == "remote"
    assert answer(response) == answer(post(colocated, "chat/completions", body))


def test_each_prompt_of_a_list_takes_its_own_route(pd, colocated):
    body = {"prompt": [SHORT, LONG, LONG + "And then?"]}
    response = post(pd, "completions", body)
    assert response.headers["x-pd-route"] == "local,remote,remote"
    assert answer(response) == answer(post(colocated, "completions", body))


def test_a_short_prompt_goes_straight_to_decode(pd, colocated):
    response = post(pd, "completions", {"prompt": SHORT})
    assert (response.headers["x-pd-route"], response.headers["x-pd-reason"]) == ("local", "prompt_below_threshold")
    assert answer(response) == answer(post(colocated, "completions", {"prompt": SHORT}))


def test_the_colocated_mode_says_so(colocated):
    response = post(colocated, "completions", {"prompt": LONG})
    assert (response.headers["x-pd-route"], response.headers["x-pd-reason"]) == ("local", "colocated")


def test_the_kv_of_a_long_prompt_arrives_by_transfer(pd):
    """An engine that computed the prompt itself would answer just the same: only its counters tell."""
    before = pd.reports("DecodeServer")[0].transferred_tokens
    response = post(pd, "completions", {"prompt": "Another story, never seen before, about a river. " * 60})
    moved = pd.reports("DecodeServer")[0].transferred_tokens - before
    assert moved >= 0.9 * response.json()["usage"]["prompt_tokens"]
