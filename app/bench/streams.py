"""Clients of a benchmark: streams whose every token is timed at the client, over the real endpoint."""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from itertools import pairwise

import httpx
import numpy as np


@dataclass
class Timeline:
    """One request: when it was sent and when each of its token events arrived (seconds, one clock)."""

    kind: str
    sent: float
    arrived: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.arrived[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.arrived)]


@dataclass(frozen=True)
class Load:
    """What a benchmark sends. Lengths in tokens, times in seconds."""

    seconds: float
    streams: int = 4
    prompt: int = 32
    long_prompt: int = 1520
    long_every: float | None = None
    """None: no long prompts."""


async def run(url: str, model: str, load: Load, seed: int) -> list[Timeline]:
    """Background streams, each followed by another one, and long prompts one after another, for `load.seconds`."""
    rng = random.Random(seed)
    timelines: list[Timeline] = []
    end = time.perf_counter() + load.seconds
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def background() -> None:
            while time.perf_counter() < end:
                await request(client, model, "short", words(rng, load.prompt), 400, end, timelines)

        async def long() -> None:
            while load.long_every and time.perf_counter() < end - load.long_every / 2:
                started = time.perf_counter()
                await request(client, model, "long", words(rng, load.long_prompt), 8, None, timelines)
                await asyncio.sleep(max(0.0, load.long_every - (time.perf_counter() - started)))

        await asyncio.gather(*(background() for _ in range(load.streams)), long())
    return timelines


async def request(
    client: httpx.AsyncClient,
    model: str,
    kind: str,
    prompt: list[int],
    max_tokens: int,
    end: float | None,
    timelines: list[Timeline],
) -> None:
    """One streamed completion; stops reading at `end`."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    timelines.append(timeline := Timeline(kind, time.perf_counter()))
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if event["choices"]:
                timeline.arrived.append(time.perf_counter())
                timeline.tokens = event["usage"]["completion_tokens"]
            if end is not None and time.perf_counter() > end:
                return


def words(rng: random.Random, count: int) -> list[int]:
    """Token ids that no prefix cache has seen."""
    return [rng.randrange(100, 40000) for _ in range(count)]


def summary(timelines: list[Timeline], seconds: float) -> dict[str, float]:
    """ITL of the short streams, TTFT of both kinds (all in milliseconds), output tokens a second."""
    gaps = np.array([gap for line in timelines if line.kind == "short" for gap in line.gaps]) * 1000
    result = {f"itl_p{q}": float(np.percentile(gaps, q)) for q in (50, 90, 99)} | {"itl_max": float(gaps.max())}
    for kind in ("short", "long"):
        first = [line.ttft * 1000 for line in timelines if line.kind == kind and line.arrived]
        result[f"ttft_{kind}"] = float(np.median(first)) if first else float("nan")
    result["tokens_per_s"] = sum(line.tokens for line in timelines) / seconds
    return result
