"""`scripts/bench`: measurements that compare, side by side in one run."""

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[Path, typer.Option(help="Folder for JSON and pictures.")]
Seconds = Annotated[float, typer.Option(help="Seconds each measurement lasts.")]
cli = typer.Typer(help=__doc__, no_args_is_help=True)


@cli.command()
def interference(seconds: Seconds = 40, out: Out = Path("results")) -> None:
    """What long prompts do to everybody else's tokens: colocated against prefill + decode."""
    from app.bench.interference import interference as run

    run(seconds, out)


@cli.command()
def overhead(seconds: Seconds = 15, out: Out = Path("results")) -> None:
    """Added TTFT and tokens/s per core next to vLLM's own server, with a simulated engine."""
    from app.bench.overhead import overhead as run

    run(seconds, out)


if __name__ == "__main__":
    cli()
