"""The loss curves of the runs, one over the other, as a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nvme_resume.consistency.compare import Run


def draw(path: Path, runs: dict[str, Run], *, save_at: int, title: str) -> None:
    """(a) as a line, (b) as dots on it, (c) dashed, the save as a vertical line."""
    # Not pyplot: it keeps global state and looks for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    styles: dict[str, dict[str, Any]] = {
        "a": {"color": "#1f4e79", "linewidth": 2.0, "zorder": 2},
        "b": {"color": "#d1495b", "linestyle": "none", "marker": "o", "markersize": 6, "zorder": 4},
        "c": {"color": "#6c757d", "linestyle": "--", "linewidth": 1.8, "zorder": 3},
    }
    for key, run in runs.items():
        steps = sorted(run.losses)
        axes.plot(steps, [run.loss(step) for step in steps], label=f"({key}) {run.name}", **styles[key])
    stop = f"saved after step {save_at}"
    axes.axvline(save_at, color="black", linestyle=":", linewidth=1.2, label=stop, zorder=1)
    axes.set_title(title, fontsize=12)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (mean over ranks and micro batches)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
