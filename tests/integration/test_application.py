"""The application on a real local Ray, with simulated engines: routes, health, death of replicas, failed starts."""

import time

import httpx
import pytest
import ray
from ray import serve

from app import serving
from app.serving import MODEL

SIMULATED = {
    "engine": "simulated",
    "simulated": {"prefill_tokens_per_s": 20000, "itl_ms": 5},
    "decode": {"cpu_binding": []},
}
LONG = list(range(1000, 1400))


@pytest.fixture(scope="module")
def cluster():
    with serving.cluster() as url:
        yield url


@pytest.fixture(scope="module")
def pd(cluster):
    return serving.deploy(cluster, serving.merged(SIMULATED, {"router": {"server_args": {"api_key": "secret"}}}))


@pytest.fixture(scope="module")
def always(cluster):
    change = {"routing": {"threshold_tokens": 0}, "decode": {"replicas": 2}}
    return serving.deploy(cluster, serving.merged(SIMULATED, change), "always", "/always")


def complete(app, prompt, **fields):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8} | fields
    return httpx.post(app.url + "/v1/completions", json=body, headers={"authorization": "Bearer secret"}, timeout=30)


def until(condition, seconds=40):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within its deadline"
        time.sleep(0.2)


def kill_replicas(app, deployment):
    """SIGKILL-like: the actors die without a word."""
    actors = serve.status().applications[app.name].deployments[deployment]
    assert actors.replica_states
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if f"SERVE_REPLICA::{app.name}#{deployment}#" in actor["name"]:
            ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]), no_restart=True)


def test_routes_and_answers_agree(pd):
    remote, local = complete(pd, LONG), complete(pd, LONG[:10])
    assert remote.headers["x-pd-route"] == "remote" and local.headers["x-pd-route"] == "local"
    assert (
        remote.json()["choices"][0]["text"] == complete(pd, LONG, n=1, prompt_logprobs=0).json()["choices"][0]["text"]
    )


def test_the_api_key_is_asked_for(pd):
    response = httpx.post(pd.url + "/v1/completions", json={"model": MODEL, "prompt": "x"})
    assert response.status_code == 401


def test_the_router_counts_by_route_reason_and_outcome(pd):
    complete(pd, LONG)
    port = ray.nodes()[0]["MetricsExportPort"]

    def counted():
        lines = httpx.get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
        return any(
            "pd_requests_total{" in line and 'route="remote"' in line and 'outcome="finished"' in line for line in lines
        )

    until(counted)


def test_always_disaggregate_sends_the_shortest_prompt_to_prefill(always):
    response = complete(always, [5])
    assert (response.headers["x-pd-route"], response.headers["x-pd-reason"]) == ("remote", "always_disaggregate")


def test_without_prefill_replicas_always_disaggregate_is_unhealthy_and_says_why(always):
    kill_replicas(always, "PrefillServer")
    until(lambda: httpx.get(always.url + "/health").status_code == 503, 15)
    health, refused = httpx.get(always.url + "/health"), complete(always, [5])
    assert "no prefill replica is alive" in health.json()["status"]
    assert refused.status_code == 503 and refused.headers["retry-after"]
    assert "prefill" in refused.json()["error"]["message"]
    until(lambda: httpx.get(always.url + "/health").status_code == 200)
    assert complete(always, [5]).headers["x-pd-route"] == "remote"


def test_without_prefill_replicas_long_prompts_fall_back_and_short_ones_do_not_notice(pd):
    kill_replicas(pd, "PrefillServer")
    until(lambda: complete(pd, LONG).headers["x-pd-reason"] in ("no_prefill_replica", "prefill_failed"), 15)
    assert complete(pd, LONG[:10]).headers["x-pd-reason"] == "prompt_below_threshold"
    assert httpx.get(pd.url + "/health").status_code == 200
    until(lambda: complete(pd, LONG).headers["x-pd-route"] == "remote")


def test_without_decode_replicas_the_endpoint_is_unhealthy_and_refuses_streams_with_a_status(pd):
    kill_replicas(pd, "DecodeServer")
    until(lambda: httpx.get(pd.url + "/health").status_code == 503, 15)
    assert "no decode replica is alive" in httpx.get(pd.url + "/health").json()["status"]
    refused = complete(pd, LONG[:10], stream=True)
    assert refused.status_code == 503 and refused.headers["retry-after"]
    until(lambda: httpx.get(pd.url + "/health").status_code == 200)
    assert complete(pd, LONG[:10]).status_code == 200


def test_a_client_that_leaves_stops_the_simulated_engine(pd):
    body = {"model": MODEL, "prompt": [7], "max_tokens": 5000, "stream": True}
    headers = {"authorization": "Bearer secret"}
    with httpx.stream("POST", pd.url + "/v1/completions", json=body, headers=headers) as response:
        lines = response.iter_lines()
        next(lines)
        assert pd.reports("DecodeServer")[0].running == 1
    until(lambda: pd.reports("DecodeServer")[0].running == 0, 3)
