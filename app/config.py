"""The typed configuration: one YAML file describes the model, the two groups, the KV plane and the routing.

Unknown fields are refused, and whatever can be known to be wrong without starting anything is refused here: every
message names the field, the value and the remedy. `load` is the only way in.
"""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from app import embedded_model
from app.errors import ConfigError

EngineArgs = dict[str, Any]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(_Strict):
    """What is served."""

    path: str = Field(
        embedded_model.NAME,
        description="Folder or hub id of the model. The same text on both roles: engines compare it at handshake. "
        f"'{embedded_model.NAME}' is the small model that scripts/setup prepares.",
    )
    served_name: str | None = Field(None, description="Name that clients send as `model`; default: `path`.")

    @property
    def folder(self) -> str:
        """What vLLM gets as `model`."""
        return str(embedded_model.path()) if self.path == embedded_model.NAME else self.path

    @property
    def name(self) -> str:
        return self.served_name or self.path


class PortRange(_Strict):
    """Ports `first` to `first + count - 1`, from which each replica is allotted its own."""

    first: int = Field(ge=1024, le=65535)
    count: int = Field(100, ge=1, le=10000)

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    def overlaps(self, other: "PortRange") -> bool:
        return self.first <= other.last and other.first <= self.last


class Resources(_Strict):
    """What one replica reserves in Ray."""

    cpus: float = Field(1, ge=0, description="Logical CPUs.")
    gpus: float = Field(0, ge=0, description="GPUs; tensor_parallel_size times pipeline_parallel_size.")
    memory_gib: float | None = Field(None, gt=0, description="Memory in GiB; unset: not reserved.")
    custom: dict[str, float] = Field(default_factory=dict, description="Ray custom resources by name.")


class Role(_Strict):
    """One group of engines: prefill or decode."""

    replicas: int = Field(1, ge=1, description="Number of engines.")
    engine_args: EngineArgs = Field(default_factory=dict, description="vLLM engine arguments by vLLM's own names.")
    resources: Resources = Field(default_factory=Resources)
    environment: dict[str, str] = Field(default_factory=dict, description="Environment variables of the replicas.")
    node_labels: dict[str, str] = Field(
        default_factory=dict, description="Ray node labels a replica's node must carry, e.g. {pd-role: prefill}."
    )
    cpu_binding: list[str] = Field(
        default_factory=list,
        description="CPU engines only: cores of each replica by its rank, in the form of VLLM_CPU_OMP_THREADS_BIND.",
    )
    side_channel_ports: PortRange = Field(description="NIXL handshake listeners, one port per data-parallel rank.")
    start_timeout_s: float = Field(600, gt=0, description="Seconds an engine may take to start.")
    max_ongoing_requests: int = Field(256, ge=1, description="Requests one replica holds at a time.")
    shutdown_timeout_s: float = Field(60, ge=0, description="Seconds a replica may take to finish its requests.")

    @property
    def tp(self) -> int:
        return int(self.engine_args.get("tensor_parallel_size", 1))


class Prefill(Role):
    side_channel_ports: PortRange = PortRange(first=20000)


class Decode(Role):
    side_channel_ports: PortRange = PortRange(first=21000)


class Fallback(_Strict):
    """Prefill trouble may move work to the decode group only while that group's streams stay protected."""

    max_concurrent: int = Field(
        2, ge=0, description="Long prompts that decode replicas may prefill themselves at a time, per router."
    )


class Routing(_Strict):
    """When a request is prefilled remotely."""

    threshold_tokens: int = Field(
        4096, ge=0, description="Prompts of at least this many tokens go prefill -> decode; 0: always disaggregate."
    )
    prefill_timeout_s: float = Field(120, gt=0, description="Seconds the prefill leg may take, queueing included.")
    fallback: Fallback = Fallback()


class Kv(_Strict):
    """How the KV cache moves from prefill to decode."""

    connector: Literal["nixl"] = Field("nixl", description="Transfer protocol.")
    backends: list[str] = Field(["UCX"], min_length=1, description="NIXL backends; ['LIBFABRIC'] on EFA.")
    lease_s: int = Field(
        60, ge=10, description="Seconds a prefill engine keeps finished KV that no decode engine has asked for."
    )


class Router(_Strict):
    """The HTTP side: vLLM's own OpenAI server."""

    replicas: int = Field(1, ge=1)
    server_args: dict[str, Any] = Field(
        default_factory=dict, description="vLLM API server arguments by vLLM's own names: api_key, tool_call_parser..."
    )
    resources: Resources = Field(default_factory=Resources)
    environment: dict[str, str] = Field(default_factory=dict)
    node_labels: dict[str, str] = Field(default_factory=dict)
    max_ongoing_requests: int = Field(4096, ge=1)
    health_interval_s: float = Field(0.5, gt=0, description="Seconds between two looks at the groups.")


class Simulated(_Strict):
    """Speeds of the simulated engine, which serves scale, fault and overhead tests only."""

    prefill_tokens_per_s: float = Field(0, ge=0, description="0: instantly.")
    itl_ms: float = Field(0, ge=0, description="Milliseconds between two tokens; 0: instantly.")


class AppConfig(_Strict):
    """Everything `app.main:build` needs."""

    mode: Literal["disaggregated", "colocated"] = Field(
        "disaggregated", description="colocated: full engines with the decode role's settings and no KV transfer."
    )
    colocated_replicas: int | None = Field(
        None, ge=1, description="Engines in colocated mode; default: prefill.replicas + decode.replicas."
    )
    engine: Literal["vllm", "simulated"] = Field("vllm", description="simulated: no model is run; tests only.")
    simulated: Simulated = Simulated()
    model: Model = Model()
    engine_args: EngineArgs = Field(default_factory=dict, description="vLLM engine arguments of both roles.")
    routing: Routing = Routing()
    kv: Kv = Kv()
    router: Router = Router()
    prefill: Prefill = Prefill()
    decode: Decode = Decode()

    def args_of(self, role: Role) -> EngineArgs:
        """The role's vLLM engine arguments: the shared ones, overridden by its own."""
        return {**self.engine_args, **role.engine_args}

    @model_validator(mode="after")
    def _roles_fit_together(self) -> "AppConfig":
        if self.prefill.side_channel_ports.overlaps(self.decode.side_channel_ports):
            ports = self.prefill.side_channel_ports
            raise ValueError(
                f"prefill.side_channel_ports {ports.first}-{ports.last} overlaps decode.side_channel_ports "
                f"{self.decode.side_channel_ports.first}-{self.decode.side_channel_ports.last}; "
                "give the two roles separate ranges: they may share a node"
            )
        if self.mode == "disaggregated":
            self._same_kv_on_both_roles()
        for section, role in (("prefill", self.prefill), ("decode", self.decode)):
            if role.side_channel_ports.last > 65535:
                raise ValueError(
                    f"{section}.side_channel_ports ends at {role.side_channel_ports.last}; lower `first` or `count` "
                    "so that it ends at 65535 or below"
                )
            if role.cpu_binding and len(role.cpu_binding) < role.replicas:
                raise ValueError(
                    f"{section}.cpu_binding names {len(role.cpu_binding)} bindings for {section}.replicas="
                    f"{role.replicas}; give one per replica or none"
                )
        return self

    def _same_kv_on_both_roles(self) -> None:
        prefill, decode = self.args_of(self.prefill), self.args_of(self.decode)
        for name in SAME_ON_BOTH_ROLES:
            if prefill.get(name) != decode.get(name):
                raise ValueError(
                    f"prefill.engine_args.{name}={prefill.get(name)!r} differs from decode.engine_args.{name}="
                    f"{decode.get(name)!r}; the KV cache cannot move between them: set {name} once, in engine_args"
                )
        prefill_tp, decode_tp = (int(args.get("tensor_parallel_size", 1)) for args in (prefill, decode))
        if prefill_tp > decode_tp or decode_tp % prefill_tp:
            raise ValueError(
                f"prefill.engine_args.tensor_parallel_size={prefill_tp} must divide "
                f"decode.engine_args.tensor_parallel_size={decode_tp} and not exceed it; "
                "lower prefill's or raise decode's"
            )


SAME_ON_BOTH_ROLES = (
    "revision",
    "dtype",
    "block_size",
    "kv_cache_dtype",
    "quantization",
    "max_model_len",
    "speculative_config",
)
"""Engine arguments that enter vLLM 0.32's NIXL compatibility hash or change the prompt's KV."""


def load(source: str | Path | dict[str, Any]) -> AppConfig:
    """Read and check a configuration given as a YAML path or as a mapping.

    Raises:
        ConfigError: with one line per fault: field, value, remedy.
    """
    if not isinstance(source, dict):
        source = _read(Path(source))
    try:
        return AppConfig.model_validate(source)
    except ValidationError as error:
        raise ConfigError("\n".join(_line(fault) for fault in error.errors())) from error


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(
            f"config={str(path)!r}: no such file; give the path of a YAML file, e.g. configs/embedded.yaml"
        )
    try:
        data = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"config={str(path)!r} is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"config={str(path)!r} holds {type(data).__name__}; it must be a mapping of fields to values")
    return data


def _line(fault: Any) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "value_error" and not where:
        return str(fault["ctx"]["error"])
    if fault["type"] == "extra_forbidden":
        return f"{where}={fault['input']!r}: no such field; remove it, or see configs/schema.json for the names"
    return f"{where}={fault['input']!r}: {fault['msg']}"
