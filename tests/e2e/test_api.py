"""The endpoint as its users call it: the real `openai` client, Python handles, bad input."""

import httpx
import openai
import pytest
from ray import serve

from app.errors import RequestRefused
from app.serving import MODEL

LONG = "A letter to the harbour master about ropes and rain. " * 40
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
LONG_CHAT = [{"role": "user", "content": LONG}]


@pytest.fixture
def client(pd):
    return openai.OpenAI(base_url=pd.url + "/v1", api_key="none", timeout=120, max_retries=0)


@pytest.mark.parametrize("messages", [CHAT, LONG_CHAT], ids=["local", "remote"])
def test_a_streamed_chat_says_the_same_as_a_whole_one(client, messages):
    fields = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_streamed_response_says_how_it_went(client):
    with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=LONG_CHAT, max_tokens=2, stream=True
    ) as response:
        assert response.headers["x-pd-route"] == "remote"


def test_the_model_knows_its_capital(client):
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, max_tokens=12)
    assert "Paris" in answer.choices[0].message.content


def test_responses_models_tokenize_detokenize_version_and_docs(client, pd):
    response = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=4, temperature=0)
    assert response.output_text
    assert [model.id for model in client.models.list()] == [MODEL]
    tokens = httpx.post(pd.url + "/tokenize", json={"model": MODEL, "prompt": "Hello there"}).json()["tokens"]
    back = httpx.post(pd.url + "/detokenize", json={"model": MODEL, "tokens": tokens}).json()
    assert back["prompt"] == "Hello there"
    assert httpx.get(pd.url + "/version").json() == {"version": "0.32.0"}
    assert httpx.get(pd.url + "/docs").status_code == 200
    assert httpx.get(pd.url + "/health").json() == {"status": "ok"}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/audio/transcriptions", "/v1/rerank"])
def test_what_is_not_offered_answers_with_an_openai_error(pd, path):
    response = httpx.post(pd.url + path, json={})
    assert response.status_code == 501 and "generates text" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"messages": []}, 400),
        ({"messages": "hello"}, 400),
        ({"model": "another"}, 404),
        ({"messages": [{"role": "user", "content": "x " * 9000}]}, 400),
        ({"temperature": -1}, 400),
        ({"max_tokens": 0}, 400),
        ({"top_p": "much"}, 400),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_is_refused_with_a_status_before_any_engine_sees_it(pd, fields, status, stream):
    before = generated(pd)
    body = {"model": MODEL, "messages": CHAT, "stream": stream} | fields
    response = httpx.post(pd.url + "/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == status and response.json()["error"]["message"]
    assert generated(pd) == before


def test_a_body_that_is_not_json_is_refused(pd):
    response = httpx.post(pd.url + "/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert response.status_code == 400


def generated(pd):
    return [report.generated_tokens for name in ("PrefillServer", "DecodeServer") for report in pd.reports(name)]


@pytest.mark.parametrize("prompt", ["short", LONG], ids=["local", "remote"])
@pytest.mark.parametrize("field", ["kv_transfer_params", "vllm_xargs"])
def test_client_sent_kv_transfer_params_reach_no_engine(pd, prompt, field):
    evil = {"do_remote_prefill": True, "remote_block_ids": [], "remote_host": "evil", "remote_port": 1}
    value = evil if field == "kv_transfer_params" else {"kv_transfer_params": "evil"}
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 3, "temperature": 0}
    honest = httpx.post(pd.url + "/v1/completions", json=body, timeout=120).json()["choices"]
    response = httpx.post(pd.url + "/v1/completions", json=body | {field: value}, timeout=120)
    assert response.status_code == 200 and response.json()["choices"] == honest
    assert httpx.get(pd.url + "/health").status_code == 200


def test_handles_chat_complete_generate_and_route(pd):
    handle = serve.get_app_handle(pd.name)
    fields = {"model": MODEL, "temperature": 0, "max_tokens": 6}
    chat = handle.chat.remote({**fields, "messages": LONG_CHAT}).result()
    assert chat["choices"][0]["message"]["content"] and chat["pd_route"] == "remote"

    streaming = handle.options(stream=True)
    chunks = list(streaming.chat.remote({**fields, "messages": LONG_CHAT, "stream": True}))
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text == chat["choices"][0]["message"]["content"]

    completion = handle.completions.remote({**fields, "prompt": "The capital of France is"}).result()
    assert "Paris" in completion["choices"][0]["text"] and completion["pd_route"] == "local"

    tokens = httpx.post(pd.url + "/tokenize", json={"model": MODEL, "prompt": "The capital of France is"}).json()[
        "tokens"
    ]
    params = {"max_tokens": 6, "temperature": 0}
    by_text = handle.generate.remote("The capital of France is", params).result()
    by_ids = handle.generate.remote(tokens, params).result()
    pieces = list(streaming.generate.remote(tokens, params, stream=True))
    assert by_text["text"] == by_ids["text"] == "".join(piece["text"] for piece in pieces)
    assert pieces[-1]["finish_reason"] == "length"


def test_route_says_what_would_happen_and_runs_nothing(pd):
    before = generated(pd)
    handle = serve.get_app_handle(pd.name)
    (chat,) = handle.route.remote({"model": MODEL, "messages": LONG_CHAT}).result()
    assert (chat["route"], chat["reason"], chat["threshold_tokens"]) == ("remote", "prompt_at_or_above_threshold", 256)
    routes = handle.route.remote({"model": MODEL, "prompt": ["a", LONG]}).result()
    assert [answer["route"] for answer in routes] == ["local", "remote"]
    assert generated(pd) == before


def test_a_refused_handle_call_carries_the_error(pd):
    handle = serve.get_app_handle(pd.name)
    for call in (
        lambda: handle.chat.remote({"model": "another", "messages": CHAT}),
        lambda: handle.completions.remote({"model": MODEL, "prompt": 7.5}),
        lambda: handle.generate.remote([1] * 9000),
        lambda: handle.route.remote({"model": MODEL, "messages": []}),
    ):
        with pytest.raises(RequestRefused) as refused:
            call().result()
        assert refused.value.body["error"]["message"]
