"""vLLM's arguments as this application uses them: names checked, and turned into vLLM's own objects.

Read from vLLM 0.32.0: `vllm/engine/arg_utils.py`, `vllm/entrypoints/launchers/cli_args.py` and
`vllm/entrypoints/launchers/render/entry.py` (how a process without an engine makes a `VllmConfig`).
"""

import dataclasses
import difflib
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import vllm.envs as envs
from vllm import AsyncEngineArgs
from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from app.config import AppConfig, Role
from app.errors import ConfigError

OURS = {
    "model": "model.path",
    "served_model_name": "model.served_name",
    "kv_transfer_config": "the `kv` section",
}
"""Engine arguments that this application sets itself, and where the operator sets them instead."""

ENGINE_ARG_NAMES = frozenset(
    field.name for field in dataclasses.fields(AsyncEngineArgs) if not field.name.startswith("_")
)


def check(config: AppConfig) -> None:
    """Refuse what only vLLM can know to be wrong, without starting anything.

    Raises:
        ConfigError: with one line per fault: field, value, remedy.
    """
    faults: list[str] = []
    for section, args in (
        ("engine_args", config.engine_args),
        ("prefill.engine_args", config.prefill.engine_args),
        ("decode.engine_args", config.decode.engine_args),
    ):
        faults += _unknown(section, args, ENGINE_ARG_NAMES)
        faults += [f"{section}.{name}={args[name]!r}: set {OURS[name]} instead" for name in OURS if name in args]
    server = vars(server_namespace())
    faults += _unknown("router.server_args", config.router.server_args, server.keys() - ENGINE_ARG_NAMES)
    faults += _missing_model(config)
    if not faults:
        faults += _context(config)
    if faults:
        raise ConfigError("\n".join(faults))


def engine_args(config: AppConfig, role: Role) -> AsyncEngineArgs:
    """The role's arguments as vLLM's own object, without the KV transfer, which the connector adds."""
    return AsyncEngineArgs(model=config.model.folder, served_model_name=[config.model.name], **config.args_of(role))


def server_namespace(config: AppConfig | None = None) -> Namespace:
    """What `vllm serve` would have parsed: vLLM's defaults, the model, and `router.server_args`."""
    parser = make_arg_parser(FlexibleArgumentParser())
    namespace = parser.parse_args([])
    if config is not None:
        engine = engine_args(config, config.decode)
        shared = {name: getattr(engine, name) for name in vars(namespace) if name in ENGINE_ARG_NAMES}
        vars(namespace).update(shared | config.router.server_args)
        # Keys given in YAML as one string; the command line would have made a list of it.
        if isinstance(namespace.api_key, str):
            namespace.api_key = [namespace.api_key]
        # Engines write their own statistics; this process has none to write.
        namespace.disable_log_stats = True
    return namespace


def model_config(config: AppConfig) -> ModelConfig:
    """The model as the decode role serves it."""
    return engine_args(config, config.decode).create_model_config()


def router_config(config: AppConfig) -> VllmConfig:
    """A `VllmConfig` for a process that renders prompts and runs no engine (no GPU needed)."""
    args = engine_args(config, config.decode)
    model = args.create_model_config()
    model.quantization = None
    # This process has no KV cache; unset, vLLM warns about its size.
    envs.VLLM_CPU_KVCACHE_SPACE = 0
    return VllmConfig(
        model_config=model,
        logging_config=args.create_logging_config(),
        structured_outputs_config=args.create_structured_outputs_config(),
    )


def _unknown(section: str, args: Mapping[str, Any], known: Iterable[str]) -> list[str]:
    faults = []
    for name in args.keys() - known:
        near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
        remedy = f"did you mean {near[0]}?" if near else "see vLLM's documentation for the names"
        faults.append(f"{section}.{name}={args[name]!r}: vLLM has no such argument; {remedy}")
    return faults


def _missing_model(config: AppConfig) -> list[str]:
    folder = config.model.folder
    looks_local = folder.startswith(("/", ".", "~"))
    if not looks_local or (Path(folder).expanduser() / "config.json").is_file():
        return []
    remedy = "run scripts/setup once" if folder != config.model.path else "give a folder that holds config.json"
    return [f"model.path={config.model.path!r}: no model at {folder}; {remedy}"]


def _context(config: AppConfig) -> list[str]:
    longest = model_config(config).max_model_len
    threshold = config.routing.threshold_tokens
    if config.mode == "colocated" or threshold <= longest:
        return []
    return [
        f"routing.threshold_tokens={threshold} is above the context length of {longest} tokens, so no request would "
        "ever be prefilled remotely; lower it, raise engine_args.max_model_len, or set mode: colocated"
    ]
