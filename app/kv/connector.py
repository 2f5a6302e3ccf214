"""What a KV transfer protocol must tell the rest of the application: one strategy object per connector.

Nothing outside `app/kv` knows a connector's name. Register further ones with `register`.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol

from vllm.config import KVTransferConfig

from app.config import Kv, PortRange
from app.errors import ConfigError

RoleName = Literal["prefill", "decode"]


class Connector(Protocol):
    """One protocol by which a decode engine gets the KV that a prefill engine computed."""

    def transfer_config(self, role: RoleName, engine_id: str) -> KVTransferConfig:
        """vLLM's configuration of this role's engine."""
        ...

    def environment(self, host: str, ports: PortRange, rank: int, ranks: int) -> dict[str, str]:
        """Variables that vLLM reads at start: addresses allotted to the replica of `rank` with `ranks` listeners."""
        ...

    def prefill_params(self) -> dict[str, Any]:
        """`kv_transfer_params` of the prefill leg."""
        ...

    def decode_params(self, answer: dict[str, Any] | None) -> dict[str, Any]:
        """`kv_transfer_params` of the decode leg, from the prefill engine's answer.

        Raises:
            PrefillError: when the answer would crash the decode engine or make it recompute in silence.
        """
        ...


_registry: dict[str, Callable[[Kv], Connector]] = {}


def register(name: str, factory: Callable[[Kv], Connector]) -> None:
    """Make a connector selectable as `kv.connector`."""
    _registry[name] = factory


def connector_of(kv: Kv) -> Connector:
    """The connector that the configuration names; there is no default to fall back to."""
    from app.kv import nixl  # noqa: F401  (registers itself)

    if kv.connector not in _registry:
        raise ConfigError(f"kv.connector={kv.connector!r}: no such connector; known are {', '.join(sorted(_registry))}")
    return _registry[kv.connector](kv)
