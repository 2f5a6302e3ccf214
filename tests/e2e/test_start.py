"""An engine that cannot start fails the deployment with the cause, within the start timeout."""

import pytest
from ray import serve

from app import serving


def test_no_memory_for_the_kv_cache_is_told_with_its_cause(cluster):
    change = {"mode": "colocated", "colocated_replicas": 1, "engine_args": {"kv_cache_memory_bytes": 2**20}}
    message = failure(cluster, change)
    assert "the engine did not start" in message and "No available memory for the cache blocks" in message


def failure(cluster, change):
    with pytest.raises(RuntimeError):
        serving.deploy(cluster, change, "broken", "/broken")
    deployments = serve.status().applications["broken"].deployments
    serve.delete("broken")
    return " ".join(state.message for state in deployments.values())
