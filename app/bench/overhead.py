"""`scripts/bench overhead`: what the application costs next to vLLM's own server, with an engine that costs nothing.

Both serve vLLM's HTTP application over the same simulated engine, in one run: vLLM's server in one process
(`app.bench.bare`), the application through Serve's proxy, the router replica and the engine replica.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from app.bench.streams import Timeline, request
from app.serving import EMBEDDED, MODEL, cluster, deploy, free_port, merged

console = Console()
ITL_MS = 5.0
"""The simulated engine's pace: 200 tokens/s a stream, more than either server carries for 16 streams on one core."""
Processes = Callable[[], list[psutil.Process]]


def overhead(seconds: float, out: Path) -> dict[str, Any]:
    """Run, print, write `overhead.json` to `out`."""
    results: dict[str, dict[str, float]] = {}
    for name, server in (("vLLM server", bare), ("application", application)):
        console.print(f"==> starting: {name}")
        with server() as (url, processes):
            asyncio.run(sequential(url, 20))
            console.print(f"==> measuring: {name}")
            results[name] = {"ttft_p50_ms": float(np.median(asyncio.run(sequential(url, 200)))) * 1000} | throughput(
                url, seconds, processes
            )
    base, app = results["vLLM server"], results["application"]
    summary = {
        "results": results,
        "added_ttft_p50_ms": app["ttft_p50_ms"] - base["ttft_p50_ms"],
        "tokens_per_core_ratio": app["tokens_per_core_s"] / base["tokens_per_core_s"],
        "engine": f"simulated, {ITL_MS} ms a token",
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "overhead.json").write_text(json.dumps(summary, indent=2))
    shown = Table(title="an engine that costs nothing (simulated)")
    for column in ("", *base):
        shown.add_column(column, justify="right")
    for name, values in results.items():
        shown.add_row(name, *(f"{value:,.1f}" for value in values.values()))
    console.print(shown)
    console.print(
        f"added TTFT p50 {summary['added_ttft_p50_ms']:.1f} ms; streamed tokens/s per core "
        f"{summary['tokens_per_core_ratio']:.2f} of vLLM's own server  ({out}/overhead.json)"
    )
    return summary


@contextmanager
def bare() -> Iterator[tuple[str, Processes]]:
    """vLLM's own server."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "app.bench.bare", str(port), str(ITL_MS)])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 180
        while not reachable(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("vLLM's server did not start; its output is above")
            time.sleep(0.5)
        yield url, lambda: [psutil.Process(process.pid)]
    finally:
        process.terminate()
        process.wait()


def reachable(url: str) -> bool:
    """Whether /health answers."""
    try:
        return httpx.get(url + "/health").status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def application() -> Iterator[tuple[str, Processes]]:
    """The application with one simulated engine."""
    change = {"engine": "simulated", "mode": "colocated", "colocated_replicas": 1, "simulated": {"itl_ms": ITL_MS}}
    with cluster() as url:
        deploy(url, merged(EMBEDDED, change))
        yield url, lambda: psutil.Process().children(recursive=True)


async def sequential(url: str, count: int) -> list[float]:
    """Seconds to the first token of `count` requests, one after another."""
    timelines: list[Timeline] = []
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for number in range(count):
            await request(client, MODEL, "short", list(range(100 + number, 132 + number)), 1, None, timelines)
    return [line.ttft for line in timelines]


def throughput(url: str, seconds: float, processes: Processes, concurrency: int = 16) -> dict[str, float]:
    """Tokens a second at `concurrency`, and per second of CPU time that the server's processes used."""
    before, started = cpu_seconds(processes()), time.perf_counter()
    timelines = asyncio.run(concurrent(url, seconds, concurrency))
    wall, cpu = time.perf_counter() - started, cpu_seconds(processes()) - before
    tokens = sum(line.tokens for line in timelines)
    events = sum(len(line.arrived) for line in timelines)
    return {
        "tokens_per_s": tokens / wall,
        "cores": cpu / wall,
        "tokens_per_core_s": tokens / cpu,
        "tokens_per_event": tokens / events,
    }


async def concurrent(url: str, seconds: float, concurrency: int) -> list[Timeline]:
    """Streams of 256 tokens, `concurrency` at a time."""
    timelines: list[Timeline] = []
    end = time.perf_counter() + seconds
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def one(number: int) -> None:
            while time.perf_counter() < end:
                await request(client, MODEL, "short", list(range(100 + number, 132 + number)), 256, None, timelines)

        await asyncio.gather(*(one(number) for number in range(concurrency)))
    return timelines


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """CPU time of processes so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)
