"""Fixtures end with this package: a process can hold one Ray session, and other packages start their own."""

import pytest

from app import serving

CHANGES = {
    # One request at a time prefills, so that another one waits.
    "prefill": {"engine_args": {"max_num_seqs": 1, "max_num_batched_tokens": 512}},
    "engine_args": {"kv_cache_memory_bytes": 512 * 2**20},
    "router": {"server_args": {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}},
}


@pytest.fixture(scope="package")
def cluster():
    with serving.cluster() as url:
        yield url


@pytest.fixture(scope="package")
def pd(cluster):
    """The application with one prefill and one decode engine: real vLLM, real NIXL."""
    return serving.deploy(cluster, CHANGES)


@pytest.fixture(scope="package")
def colocated(cluster, pd):
    """The same model in one full engine: what every answer is compared with."""
    change = {"mode": "colocated", "colocated_replicas": 1}
    return serving.deploy(cluster, serving.merged(CHANGES, change), "colocated", "/colocated")
