"""All measurements, in under ten minutes on two cores: ``make bench`` (``python -m benchmarks.run --help``).

Writes ``results.json`` (every single figure), ``results.md`` (medians and ratios) and ``results.png`` into the output
folder.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import report

SIZES = ((0.3, 3), (1.0, 3), (4.0, 2))  # swapped state in GB, rounds
ROOT = Path(__file__).resolve().parent.parent


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def worker(module: str, *arguments: object) -> Any:
    """The JSON that one measurement prints last, from a fresh process."""
    port = free_port()
    place = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    typer.echo(f"{module} {' '.join(str(a) for a in arguments[:-1])} ...")
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *(str(a) for a in arguments)],
        cwd=ROOT,
        env={**os.environ, **place},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{module} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(
    out: Annotated[Path, typer.Option(help="where the results go")] = ROOT / "benchmarks" / "results",
    scratch: Annotated[
        Path | None, typer.Option(help="a folder on the disk to measure (default: beside the checkout)")
    ] = None,
    quick: Annotated[bool, typer.Option(help="small sizes, one round: does it run at all?")] = False,
) -> None:
    """Measure, and write results.json, results.md and results.png."""
    sizes = ((0.1, 1),) if quick else SIZES
    results: dict[str, Any] = {
        "machine": {
            "kernel": platform.release(),
            "cores": os.cpu_count(),
            "processor": platform.machine(),
            "python": platform.python_version(),
        }
    }
    with tempfile.TemporaryDirectory(dir=scratch or ROOT.parent, prefix="bench-") as folder:
        results["copier_mib"] = 128 if quick else 1024
        results["copier"] = worker("copier", results["copier_mib"], 1 if quick else 3, Path(folder) / "copy")
        for gigabytes, rounds in sizes:
            place = Path(folder) / str(gigabytes)
            place.mkdir()
            results.setdefault("save_and_load", {})[str(gigabytes)] = worker(
                "save_and_load", gigabytes, rounds, place
            )
            subprocess.run(["rm", "-rf", str(place)], check=True)
        for name, limit in (("unlimited", 0), ("limited", 50)):
            place = Path(folder) / name
            place.mkdir()
            gigabytes, rounds = (0.1, 1) if quick else (1.0 if limit == 0 else 0.5, 3)
            results.setdefault("drain", {})[name] = worker("drain", gigabytes, rounds, limit, place)
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    text = report.markdown(results)
    (out / "results.md").write_text(text)
    report.draw(results, out / "results.png")
    typer.echo(text)
    typer.echo(f"written to {out}")


if __name__ == "__main__":
    typer.run(main)
