"""The engine replicas: `PrefillServer` and `DecodeServer`, one engine each. They know nothing of HTTP or of routing.

Invariant: when a call ends, for whatever reason, the engine holds nothing of it any more, or somebody else has been
told where it is (a prefill answer to the caller, an orphan in the report).
"""

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import ray
from ray import serve

from app.config import AppConfig, Role
from app.engines.cpu_threads import settle
from app.engines.engine import Engine, EngineReport, Stream
from app.engines.wire import ADMITTED, EngineCall, PrefillAnswer, encode_chunk
from app.kv.connector import RoleName, connector_of

logger = logging.getLogger("ray.serve")


class EngineServer:
    """What both replicas do: start one engine, report on it, stop it."""

    role: RoleName

    async def __init__(self, config: AppConfig) -> None:  # type: ignore[misc]
        self.engine: Engine = await start_engine(config, self.role)
        logger.info("engine_ready role=%s engine_id=%s", self.role, self.engine.engine_id)

    def report(self, take_orphans: bool = False) -> EngineReport:
        """The engine's counters at its last step; with `take_orphans` the caller promises to release what it reads."""
        return self.engine.report()

    def check_health(self) -> None:
        """Called by Serve; raising has the replica replaced."""
        self.engine.check_health()

    def record_replica_metadata(self) -> dict[str, str]:
        """Published once to every handle."""
        return {"role": self.role, "engine_id": self.engine.engine_id}

    def __del__(self) -> None:
        if engine := getattr(self, "engine", None):
            engine.shutdown()


class PrefillServer(EngineServer):
    """Computes the KV of prompts and answers where it lies."""

    role: RoleName = "prefill"

    async def __init__(self, config: AppConfig) -> None:  # type: ignore[misc]
        await super().__init__(config)
        self._orphans: list[dict[str, Any]] = []

    async def prefill(self, call: EngineCall) -> PrefillAnswer | None:
        """Run a one-token request; None if the engine gave no hand-off."""
        stream = await admit(self.engine, call)
        output = None
        try:
            while (step := await stream.next()) is not None:
                output = step
        except asyncio.CancelledError:
            await stream.abort()
            late = stream.pending()
            if late is not None and late.kv_transfer_params:
                # The KV was ready and leased before the abort: nobody would ever read it.
                self._orphans.append(late.kv_transfer_params)
            raise
        except BaseException:
            await stream.abort()
            raise
        if output is None or not output.kv_transfer_params:
            return None
        return PrefillAnswer(output.kv_transfer_params, output.num_cached_tokens or 0)

    def report(self, take_orphans: bool = False) -> EngineReport:
        report = replace(super().report(), orphans=tuple(self._orphans))
        if take_orphans:
            self._orphans.clear()
        return report


class DecodeServer(EngineServer):
    """Runs requests to their end, with the KV of a hand-off or from the prompt alone."""

    role: RoleName = "decode"

    async def generate(self, call: EngineCall) -> AsyncIterator[bytes]:
        """Stream chunks (see `app.engines.wire`); `ADMITTED` comes first when the call continues a hand-off."""
        stream = await admit(self.engine, call)
        try:
            if call.kv_transfer_params is not None:
                yield ADMITTED
            # Each item holds all that the engine produced while the last one was on its way: no timer, no lost time.
            while (output := await stream.next()) is not None:
                yield encode_chunk(output)
        finally:
            await stream.abort()

    async def release(self, request_id: str, kv_transfer_params: dict[str, Any]) -> None:
        """Free the prefill engine's KV of a hand-off that no decode engine will read."""
        await self.engine.release(request_id, kv_transfer_params)


async def admit(engine: Engine, call: EngineCall) -> Stream:
    """Give a request to the engine, all or nothing: after a cancellation or an error the engine holds nothing of it."""
    adding = asyncio.ensure_future(engine.add(call))
    try:
        return await asyncio.shield(adding)
    except asyncio.CancelledError:
        # Half-way the engine may own the request already: let it, then abort, which also frees a hand-off's KV.
        await (await adding).abort()
        raise
    except Exception:
        if call.kv_transfer_params is not None and call.kv_transfer_params.get("do_remote_prefill"):
            await engine.release(call.request_id, call.kv_transfer_params)
        raise


async def start_engine(config: AppConfig, role_name: RoleName) -> Engine:
    """Start the engine that the configuration asks for in this replica.

    Raises:
        EngineStartError: with the cause.
    """
    role = config.prefill if role_name == "prefill" else config.decode
    context = serve.get_replica_context()
    # Unique per process start: an engine that restarts on the same address must not look like its predecessor.
    engine_id = f"{role_name}-{context.replica_id.unique_id}-{uuid.uuid4().hex[:8]}"
    if config.engine == "simulated":
        from app.engines.simulated import SimulatedEngine

        return SimulatedEngine(config, engine_id)

    from app.engines.vllm_engine import VllmEngine
    from app.vllm_args import engine_args

    rank = context.rank.rank
    args = engine_args(config, role)
    if config.mode == "disaggregated":
        connector = connector_of(config.kv)
        args.kv_transfer_config = connector.transfer_config(role_name, engine_id)
        ranks = int(config.args_of(role).get("data_parallel_size", 1))
        host = ray.util.get_node_ip_address()
        os.environ |= connector.environment(host, role.side_channel_ports, rank, ranks)
    bindings = cpu_bindings(config, role)
    if not bindings:
        return await VllmEngine.start(args, engine_id, role.start_timeout_s)
    cores = os.environ["VLLM_CPU_OMP_THREADS_BIND"] = bindings[rank % len(bindings)]
    engine = await VllmEngine.start(args, engine_id, role.start_timeout_s)
    await asyncio.to_thread(settle, cores)
    return engine


def cpu_bindings(config: AppConfig, role: Role) -> list[str]:
    """The cores of each replica by rank; colocated engines take those of both roles."""
    if config.mode == "colocated":
        return [*config.prefill.cpu_binding, *config.decode.cpu_binding]
    return role.cpu_binding
