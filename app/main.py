"""`app.main:build` is the import path of the application: it reads top to bottom as the picture in README.md.

This module must not postpone annotations (`from __future__ import annotations`): Serve looks at the builder's.
"""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve import Application

from app import config as configuration
from app import vllm_args
from app.config import AppConfig, Resources, Role
from app.engines.server import DecodeServer, PrefillServer
from app.router.router import Router

IN_ONE_LOOP = {
    # Serve runs user code in a thread of its own by default, which costs each streamed item two hand-overs between
    # event loops. Nothing here blocks a loop: engines are processes, and they are started in a thread.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}


class BuildArgs(BaseModel):
    """Arguments of `build`: `serve run app.main:build config=PATH`, or `args:` in a Serve config file."""

    model_config = ConfigDict(extra="forbid")

    config: Path | dict[str, Any] = Path("configs/embedded.yaml")
    """A YAML file, or its content inline."""


def build(args: BuildArgs) -> Application:
    """The application that the configuration describes.

    Raises:
        ConfigError: before anything is started.
    """
    config = configuration.load(args.config)
    vllm_args.check(config)

    if config.mode == "colocated":
        engines = config.colocated_replicas or config.prefill.replicas + config.decode.replicas
        decode = deployment(DecodeServer, config.decode, engines).bind(config)
        prefill = None
    else:
        prefill = deployment(PrefillServer, config.prefill, config.prefill.replicas).bind(config)
        decode = deployment(DecodeServer, config.decode, config.decode.replicas).bind(config)
    return router(config).bind(config, decode, prefill)


def deployment(server: type[PrefillServer] | type[DecodeServer], role: Role, replicas: int) -> serve.Deployment:
    """One group of engine replicas on its nodes."""
    return serve.deployment(name=server.__name__)(server).options(
        num_replicas=replicas,
        max_ongoing_requests=role.max_ongoing_requests,
        graceful_shutdown_timeout_s=role.shutdown_timeout_s,
        # A failed start is explained at once: trying again would hide the cause behind minutes of loading.
        max_constructor_retry_count=1,
        health_check_period_s=5,
        ray_actor_options=actor_options(role.resources, role.node_labels, role.environment),
    )


def router(config: AppConfig) -> serve.Deployment:
    """The router group: CPU nodes, any number of replicas."""
    settings = config.router
    return Router.options(
        num_replicas=settings.replicas,
        max_ongoing_requests=settings.max_ongoing_requests,
        max_constructor_retry_count=1,
        ray_actor_options=actor_options(settings.resources, settings.node_labels, settings.environment),
    )


def actor_options(resources: Resources, labels: dict[str, str], environment: dict[str, str]) -> dict[str, Any]:
    """Ray's options of one replica."""
    options: dict[str, Any] = {
        "num_cpus": resources.cpus,
        "num_gpus": resources.gpus,
        "resources": resources.custom,
        "runtime_env": {"env_vars": IN_ONE_LOOP | environment},
    }
    if resources.memory_gib is not None:
        options["memory"] = int(resources.memory_gib * 2**30)
    if labels:
        options["label_selector"] = labels
    return options
