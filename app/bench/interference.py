"""`scripts/bench interference`: what long prompts do to everybody else's tokens, colocated and disaggregated.

Both sides run the same two engines on the same cores behind the same router; only `mode` differs.
"""

import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path

import matplotlib
from ray import serve
from rich.console import Console
from rich.table import Table

from app.bench.streams import Load, Timeline, run, summary
from app.serving import EMBEDDED, MODEL, cluster, deploy, merged

matplotlib.use("Agg")
console = Console()
COLUMNS = ("itl_p50", "itl_p90", "itl_p99", "itl_max", "ttft_short", "ttft_long", "tokens_per_s")


def interference(seconds: float, out: Path) -> float:
    """Run, print, write `interference.json` and `.png` to `out`; returns max ITL, colocated / disaggregated."""
    load = Load(seconds)
    long = replace(load, long_every=3.0)
    runs: dict[str, list[Timeline]] = {}
    with cluster() as url:
        for mode, loads in (
            ("colocated", {"alone": load, "colocated": long}),
            ("disaggregated", {"disaggregated": long}),
        ):
            console.print(f"==> starting two engines, mode: {mode}")
            deploy(url, merged(EMBEDDED, {"mode": mode}))
            for name, chosen in loads.items():
                # Warm up: the first transfer connects the pair.
                asyncio.run(run(url, MODEL, replace(chosen, seconds=6), seed=1))
                console.print(f"==> measuring: {name}, {seconds:.0f} s")
                runs[name] = asyncio.run(run(url, MODEL, chosen, seed=2))
            serve.delete("pd")
    results = {name: summary(lines, seconds) for name, lines in runs.items()}
    ratio = results["colocated"]["itl_max"] / results["disaggregated"]["itl_max"]
    out.mkdir(parents=True, exist_ok=True)
    (out / "interference.json").write_text(
        json.dumps({"load": asdict(long), "results": results, "itl_max_colocated_over_disaggregated": ratio}, indent=2)
    )
    picture(runs, out / "interference.png")
    console.print(table(results))
    console.print(f"max ITL, colocated / disaggregated: {ratio:.1f}  ({out}/interference.json, .png)")
    return ratio


def table(results: dict[str, dict[str, float]]) -> Table:
    """One row a run."""
    shown = Table(title="background streams while long prompts arrive (ms; tokens/s)")
    shown.add_column("run")
    for column in COLUMNS:
        shown.add_column(column, justify="right")
    for name, values in results.items():
        shown.add_row(name, *(f"{values[column]:,.0f}" for column in COLUMNS))
    return shown


def picture(runs: dict[str, list[Timeline]], path: Path) -> None:
    """Every token of every background stream as a tick; a gap is a stall. Long prompts are shaded."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(runs), 1, figsize=(12, 2.2 * len(runs)), sharex=True, squeeze=False)
    for axis, (name, lines) in zip(axes[:, 0], runs.items(), strict=True):
        start = min(line.sent for line in lines)
        row = -1
        for line in sorted((line for line in lines if line.kind == "short"), key=lambda line: line.sent):
            row = (row + 1) % 4
            axis.plot([moment - start for moment in line.arrived], [row] * len(line.arrived), "|", color="C0", ms=9)
        for line in (line for line in lines if line.kind == "long" and line.arrived):
            axis.axvspan(line.sent - start, line.arrived[0] - start, color="C1", alpha=0.25, lw=0)
        axis.set_title(name, loc="left", fontsize=10)
        axis.set_yticks(range(4), [f"stream {number + 1}" for number in range(4)])
        axis.set_ylim(-0.6, 3.6)
    axes[-1, 0].set_xlabel("seconds (one tick a token; shaded: a long prompt waits for its first token)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
