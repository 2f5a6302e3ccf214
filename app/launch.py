"""`scripts/run`: one machine, one command. Starts Ray and Serve of its own, shows progress, stops exactly those.

It reads the same Serve config file that `serve run` and `serve deploy` take.
"""

import json
import os
import signal
import socket
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.status import Status

console = Console(stderr=True, highlight=False)


def main(
    serve_config: Annotated[Path, typer.Argument(help="A Serve config file.")] = Path("serve_config.yaml"),
    port: Annotated[int | None, typer.Option(help="HTTP port, instead of the file's.")] = None,
) -> None:
    """Serve until Ctrl-C (or SIGTERM)."""
    started = time.monotonic()
    file: dict[str, Any] = yaml.safe_load(serve_config.read_text())
    http = {"host": "127.0.0.1", "port": 8000} | file.get("http_options", {}) | ({"port": port} if port else {})
    (application,) = file["applications"]
    refuse_taken(http["host"], http["port"])

    console.print("[bold]==>[/] checking the configuration")
    built = build(application)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    try:
        console.print("[bold]==>[/] starting Ray")
        # A small machine has fewer cores than this application has processes; they are light but for the engines.
        ray.init(address="local", num_cpus=max(8, os.cpu_count() or 1), include_dashboard=False, log_to_driver=False)
        # After ray.init, which installs a handler of its own for SIGTERM.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupt)
        serve.start(proxy_location=file.get("proxy_location", "HeadOnly"), http_options=http)
        deploy(serve, application, built)
        console.print(f"[bold green]==>[/] serving after {time.monotonic() - started:.0f} s; Ctrl-C stops\n")
        print(invitation(http, application), flush=True)
        threading.Event().wait()
    except KeyboardInterrupt:
        console.print("[bold]==>[/] stopping")
    except RuntimeError as error:
        console.print(f"[bold red]==>[/] {error}", markup=False)
        raise typer.Exit(1) from error
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if ray.is_initialized():
            from app.serving import stop

            stop()


def interrupt(*_: Any) -> None:
    """A handler of its own: a shell starts background jobs with SIGINT ignored."""
    raise KeyboardInterrupt


def build(application: dict[str, Any]) -> Any:
    """The application, or exit status 1 with the configuration's faults."""
    from app.errors import ConfigError

    module, name = application["import_path"].split(":")
    main_module = import_module(module)
    try:
        return getattr(main_module, name)(main_module.BuildArgs(**application.get("args", {})))
    except ConfigError as error:
        console.print(f"[bold red]==>[/] {error}", markup=False)
        raise typer.Exit(1) from error


def deploy(serve: Any, application: dict[str, Any], built: Any) -> None:
    """Deploy and show each deployment's state until all are up.

    Raises:
        RuntimeError: with the cause when a deployment fails.
    """
    failure: list[BaseException] = []

    def run() -> None:
        try:
            serve.run(built, name=application["name"], route_prefix=application.get("route_prefix", "/"))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    begun = time.monotonic()
    with console.status("starting engines") as status:
        while thread.is_alive():
            show(serve, application["name"], status, time.monotonic() - begun)
            thread.join(0.5)
    if failure:
        deployments = serve.status().applications[application["name"]].deployments
        causes = [f"{name}: {state.message}" for name, state in deployments.items() if "fail" in state.status.lower()]
        raise RuntimeError("\n".join(causes) or str(failure[0]))


def show(serve: Any, name: str, status: Status, seconds: float) -> None:
    """One line: which deployments are up."""
    overview = serve.status().applications.get(name)
    states = overview.deployments.items() if overview else ()
    line = "  ".join(f"{deployment} {state.status.value.lower()}" for deployment, state in states)
    status.update(f"starting engines, {seconds:.0f} s  {line}")


def refuse_taken(host: str, port: int) -> None:
    """Exit with a remedy when the HTTP port is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            console.print(f"[bold red]==>[/] port {port} is in use; choose another: scripts/run --port {port + 1}")
            raise typer.Exit(1) from error


def invitation(http: dict[str, Any], application: dict[str, Any]) -> str:
    """The URL and a request to paste."""
    from app import config as configuration

    model = configuration.load(application.get("args", {}).get("config", "configs/embedded.yaml")).model.name
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]})
    url = f"http://{http['host']}:{http['port']}"
    request = f"curl -i {url}/v1/chat/completions \\\n    -H 'Content-Type: application/json' \\\n    -d '{body}'"
    return f"{url}  (API description: {url}/docs)\n\n  {request}\n"


if __name__ == "__main__":
    typer.run(main)
