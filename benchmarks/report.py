"""Medians, ratios and a picture from the raw figures."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MIB = 1 << 20


def markdown(results: dict[str, Any]) -> str:
    """All tables."""
    machine = results["machine"]
    parts = [
        f"Linux {machine['kernel']}, {machine['cores']} cores, Python {machine['python']}. "
        "Medians of interleaved rounds.",
        _saves(results["save_and_load"]),
        _drains(results["drain"]),
        _copier(results["copier"], results["copier_mib"]),
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines)


def saves(figures: dict[str, Any]) -> dict[str, float]:
    """The figures of one size that matter, in seconds, bytes and ratios."""
    stock = median(a + b for a, b in zip(figures["stock_save"], figures["stock_fsync"], strict=True))
    ours, step = median(figures["our_save"]), median(figures["step"])
    return {
        "stock": stock,
        "ours": ours,
        "ratio": stock / ours,
        "step": step,
        "after": median(figures["step_after_ours"]) / step,
        "after_stock": median(figures["step_after_stock"]) / step,
        "written": median(figures["our_written"]),
        "stock_written": median(figures["stock_written"]),
        "stock_load": median(figures["stock_load"]),
        "our_load": median(figures["our_load"]),
        "peak": max(figures["our_load_peak"]),
    }


def _saves(sizes: dict[str, Any]) -> str:
    rows, loads = [], []
    for figures in sizes.values():
        s = saves(figures)
        state = f"{figures['state_bytes'] / 1e9:.2f} GB in {figures['state_files']} files"
        rows.append(
            [
                state,
                f"{s['stock']:.2f} s",
                f"{s['ours'] * 1e3:.1f} ms",
                f"**{s['ratio']:.0f}**",
                f"{s['step']:.2f} s",
                f"{s['after']:.2f}",
                f"{s['after_stock']:.2f}",
                f"{s['written'] / 1024:.0f} KiB",
                f"{s['stock_written'] / MIB:.0f} MiB",
            ]
        )
        loads.append(
            [
                state,
                f"{s['stock_load']:.2f} s",
                f"{s['our_load']:.2f} s",
                f"**{s['stock_load'] / s['our_load']:.1f}**",
                f"{s['peak'] / MIB:.0f} MiB",
            ]
        )
    head = ["swapped state", "stock + fsync", "nvme_resume", "ratio", "step", "first step after ours / step"]
    head += ["after stock / step", "written by our save", "by stock"]
    first = "## Save on one filesystem\n\n" + _table(head, rows)
    head = ["swapped state", "stock", "nvme_resume", "ratio", "peak memory above the engine's"]
    return first + "\n\n## Load on one filesystem, caches cold\n\n" + _table(head, loads)


def slowdown(figures: dict[str, Any]) -> float:
    """Time of all steps beside a copy over that of as many without."""
    return float(sum(figures["with"]) / sum(figures["without"]))


def _drains(drains: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{median(f['stall']) * 1e3:.0f} ms",
            f"{median(f['copy']):.1f} s",
            f"{median(f['steps']):.0f}",
            f"{(slowdown(f) - 1) * 100:+.1f} %",
        ]
        for name, f in drains.items()
    ]
    head = ["background copy to the same disk", "stall", "until the commit", "steps meanwhile", "slower by"]
    return "## Training beside a background copy\n\n" + _table(head, rows)


def _copier(variants: dict[str, Any], total: int) -> str:
    rows = [
        [
            name,
            f"{median(total / r['seconds'] for r in rounds):.0f}",
            f"{median(r['cpu'] for r in rounds):.2f} s",
            f"{median(r['cache'] for r in rounds) / MIB:.0f} MiB",
            rounds[0]["source"],
        ]
        for name, rounds in variants.items()
    ]
    head = ["copier", "MiB/s", "CPU", "page cache left", "source"]
    return f"## Copier, {total} MiB in 8 files, durable\n\n" + _table(head, rows)


def draw(results: dict[str, Any], path: Path) -> None:
    """Save stall and load time over size, and the copiers."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.5))
    sizes = [f["state_bytes"] / 1e9 for f in results["save_and_load"].values()]
    found = [saves(f) for f in results["save_and_load"].values()]
    for axis, stock, ours, title in (
        (left, "stock", "ours", "save stall"),
        (middle, "stock_load", "our_load", "load"),
    ):
        axis.plot(
            sizes,
            [s[stock] for s in found],
            "o-",
            color="#888888",
            label="DeepSpeed" + " + fsync" * (axis is left),
        )
        axis.plot(sizes, [s[ours] for s in found], "o-", color="#0066cc", label="nvme_resume")
        axis.set(title=title, xlabel="swapped state, GB", ylabel="seconds", yscale="log")
        axis.grid(alpha=0.3)
        axis.legend()
    names = list(results["copier"])
    speeds = [median(1 / r["seconds"] for r in rounds) for rounds in results["copier"].values()]
    best = max(speeds)
    colours = ["#0066cc" if n.startswith("nvme_resume") else "#888888" for n in names]
    right.barh(names[::-1], [s / best for s in speeds[::-1]], color=colours[::-1])
    right.set(title="copier, durable", xlabel="speed (1 = fastest)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
