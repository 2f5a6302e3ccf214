"""Starts the application from Python on a Ray session of its own: what tests and benchmarks stand on."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import serve
from ray.serve.handle import DeploymentHandle

from app.main import BuildArgs, build

ROOT = Path(__file__).parents[1]
EMBEDDED: dict[str, Any] = yaml.safe_load((ROOT / "configs/embedded.yaml").read_text())
MODEL = "smollm2-135m-instruct"


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`base` with the fields of `change`, section by section."""
    result = dict(base)
    for name, value in change.items():
        nested = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = merged(result[name], value) if nested else value
    return result


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Serving:
    """A running application: its HTTP root and its handles."""

    name: str
    url: str

    @property
    def handle(self) -> DeploymentHandle[Any]:
        return serve.get_app_handle(self.name)

    def reports(self, deployment: str) -> list[Any]:
        """Each engine's own counters."""
        return serve.get_deployment_handle(deployment, self.name).broadcast("report").results(timeout_s=30)


@contextmanager
def cluster() -> Iterator[str]:
    """A Ray session with Serve on a free port; yields the HTTP root."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    port = free_port()
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        stop()


def deploy(url: str, change: dict[str, Any], name: str = "pd", prefix: str = "/") -> Serving:
    """Deploy the embedded configuration with `change`; waits until it serves."""
    serve.run(build(BuildArgs(config=merged(EMBEDDED, change))), name=name, route_prefix=prefix)
    return Serving(name, url + prefix.rstrip("/"))


def stop() -> None:
    """Take everything down: applications first, which lets engines give their memory back, then Serve, then Ray."""
    for name in serve.status().applications:
        serve.delete(name)
    serve.shutdown()
    ray.shutdown()
