"""`scripts/check CONFIG`: validates a configuration without starting anything; `--schema` prints its JSON Schema."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer
import yaml

from app import config as configuration
from app.config import AppConfig
from app.errors import ConfigError


def main(
    config: Annotated[Path | None, typer.Argument(help="YAML file of the application, or a Serve config file.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema and stop.")] = False,
) -> None:
    """Exit status 0: the configuration can work. 1: one line per fault, with its field, value and remedy."""
    if schema:
        print(json.dumps(AppConfig.model_json_schema(), indent=2))
        return
    if config is None:
        raise typer.BadParameter("give the path of a YAML file, e.g. configs/embedded.yaml")
    try:
        loaded = configuration.load(application_of(config))
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        # vLLM takes seconds to import: only once the file is well-formed.
        from app import vllm_args

        vllm_args.check(loaded)
    except ConfigError as error:
        print(error)
        raise typer.Exit(1) from error
    print(f"{config}: ok ({loaded.mode}, {loaded.model.name})")


def application_of(path: Path) -> Path | dict[str, object]:
    """The application's configuration: the file itself, or what a Serve config file names or holds inline."""
    if not path.is_file():
        return path
    data = yaml.safe_load(path.read_text())
    if not isinstance(data, dict) or "applications" not in data:
        return path
    (application,) = data["applications"]
    named: str | dict[str, object] = application.get("args", {}).get("config", "configs/embedded.yaml")
    return named if isinstance(named, dict) else path.parent / named


if __name__ == "__main__":
    typer.run(main)
