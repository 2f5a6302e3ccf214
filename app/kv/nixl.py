"""NIXL pull: the decode engine READs the KV out of the prefill engine.

The prefill answer's `kv_transfer_params` say where the KV lies; the router carries them verbatim to whichever decode
replica it chooses afterwards. The prefill engine keeps the KV under a lease until the decode engine has read it or said
that it will not. Protocol: vLLM 0.32.0, `distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py`.
"""

from typing import Any

from vllm.config import KVTransferConfig

from app.config import Kv, PortRange
from app.errors import PrefillError
from app.kv.connector import RoleName, register
from app.kv.ports import allot

REQUIRED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class NixlPull:
    """`NixlConnector` with a producer and a consumer."""

    def __init__(self, kv: Kv) -> None:
        self._kv = kv

    def transfer_config(self, role: RoleName, engine_id: str) -> KVTransferConfig:
        return KVTransferConfig(
            kv_connector="NixlConnector",
            kv_role="kv_producer" if role == "prefill" else "kv_consumer",
            engine_id=engine_id,
            # A failed load ends the request with an error that the router sees; vLLM's other policy recomputes unseen.
            kv_load_failure_policy="fail",
            kv_connector_extra_config={"backends": self._kv.backends, "kv_lease_duration": self._kv.lease_s},
        )

    def environment(self, host: str, ports: PortRange, rank: int, ranks: int) -> dict[str, str]:
        port = allot(ports, rank, ranks)
        return {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}

    def prefill_params(self) -> dict[str, Any]:
        return {"do_remote_decode": True, "do_remote_prefill": False}

    def decode_params(self, answer: dict[str, Any] | None) -> dict[str, Any]:
        if not answer or not answer.get("do_remote_prefill"):
            raise PrefillError("the prefill engine returned no kv_transfer_params: it aborted the request")
        if missing := [name for name in REQUIRED if not answer.get(name)]:
            raise PrefillError(f"the prefill engine's kv_transfer_params lack {', '.join(missing)}")
        if not any(answer.get("remote_block_ids") or ()):
            # A decode engine asserts on this and dies (pull_scheduler.py, update_state_after_alloc).
            raise PrefillError("the prefill engine's kv_transfer_params name no KV blocks")
        return answer


register("nixl", NixlPull)
