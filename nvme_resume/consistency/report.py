"""The result of a check: as JSON for machines, as a table and sentences for people."""

from __future__ import annotations

import json
import math
import platform
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nvme_resume.consistency.compare import Run, Verdict
from nvme_resume.consistency.spec import AT_END, AT_SAVE
from nvme_resume.version import __version__

FORMAT = 1


@dataclass
class Report:
    """Everything that was measured and found."""

    settings: dict[str, Any]
    config: dict[str, Any]
    runs: dict[str, Run]  # "a", "b", "c"
    verdicts: dict[str, Verdict]  # "b", "c"
    save_at: int
    steps: int
    tolerance: float | None
    files: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """The verdict on nvme_resume; plain DeepSpeed's does not count."""
        return self.verdicts["b"].within(self.tolerance)

    @property
    def exit_code(self) -> int:
        """0 for a pass, 1 otherwise."""
        return 0 if self.passed else 1

    def content(self) -> dict[str, Any]:
        """All of it as plain values."""
        found = {
            "format": FORMAT,
            "passed": self.passed,
            "exact": self.verdicts["b"].equal,
            "exit_code": self.exit_code,
            "tolerance": self.tolerance,
            "steps": [self._row(step) for step in range(1, self.steps + 1)],
            "verdicts": {
                key: {**asdict(v), "equal": v.equal, "explanation": v.explanation()}
                for key, v in self.verdicts.items()
            },
            "runs": {key: asdict(run) for key, run in self.runs.items()},
            "settings": self.settings,
            "config": self.config,
            "versions": versions(),
            "files": self.files,
        }
        plain: dict[str, Any] = _plain(found)
        return plain

    def write(self, path: Path) -> None:
        """Store it as JSON."""
        path.write_text(self.json() + "\n")

    def json(self) -> str:
        """All of it as JSON text."""
        return json.dumps(self.content(), indent=1)

    def _row(self, step: int) -> dict[str, Any]:
        row: dict[str, Any] = {"step": step}
        row.update({key: run.loss(step) for key, run in self.runs.items()})
        row.update({f"ulp_{key}": verdict.ulp[step] for key, verdict in self.verdicts.items()})
        return row

    def show(self, console: Console) -> None:
        """The table, then the verdict, then what differs."""
        legend = ", ".join(f"({key}) {run.name}" for key, run in self.runs.items())
        console.print(
            f"Loss by optimizer step: {legend}. Saved after step {self.save_at}. Losses are means over ranks and "
            "micro batches; ULP is the largest distance of any single one of them, counted in float32 values.",
            highlight=False,
        )
        console.print(self._table())
        for key, verdict in self.verdicts.items():
            _show_verdict(console, key, verdict, self.tolerance)
        if not all(
            math.isfinite(v) for losses in self.runs["a"].losses.values() for rank in losses for v in rank
        ):
            console.print("[yellow]Losses of (a) are not finite: equality of such numbers says little.[/]")
        for what, path in self.files.items():
            # soft_wrap: a path must stay one word, to be copied
            console.print(f"{what}: {escape(path)}", soft_wrap=True, highlight=False)

    def _table(self) -> Table:
        table = Table()
        for heading in (
            "step",
            *(f"({key})" for key in self.runs),
            *(f"ULP ({k})-(a)" for k in self.verdicts),
        ):
            table.add_column(heading, justify="right")
        for step in range(1, self.steps + 1):
            cells = [str(step), *(f"{run.loss(step):.9g}" for run in self.runs.values())]
            cells += [_ulp(verdict.ulp[step]) for verdict in self.verdicts.values()]
            table.add_row(*cells, end_section=step == self.save_at)
        return table


def versions() -> dict[str, str]:
    """Versions of all that computes."""
    found = {"nvme_resume": __version__, "python": platform.python_version()}
    for name in ("deepspeed", "torch", "transformers", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _ulp(distance: int | None) -> str:
    if distance == 0:
        return "[green]0[/]"
    return "[red]not a number[/]" if distance is None else f"[red]{distance:+,}[/]"


def _show_verdict(console: Console, key: str, verdict: Verdict, tolerance: float | None) -> None:
    name = f"({key}) {verdict.run}"
    if key == "b" and tolerance is not None:
        console.print(
            f"[bold yellow]NOT AN EXACT CHECK:[/] losses may be {tolerance:g} apart, "
            "state and data are not judged."
        )
        word = "[yellow]within[/]" if verdict.within(tolerance) else "[red]NOT within[/]"
        console.print(
            f"{name}: {word} the tolerance, largest difference of a loss {verdict.largest:g}", highlight=False
        )
    if verdict.equal:
        console.print(
            f"{name}: [bold green]EQUAL[/] to the last bit ({verdict.compared} losses and digests)",
            highlight=False,
        )
        return
    first = (
        f"first differing loss at step {verdict.differing_steps[0]}"
        if verdict.differing_steps
        else "losses equal"
    )
    console.print(f"{name}: [bold red]DIFFERENT[/] from the uninterrupted run, {first}", highlight=False)
    for line in verdict.explanation():
        console.print(f"  {escape(line)}", highlight=False)
    # What was not restored explains what differs later; the later list is long and says no more.
    loaded, later = verdict.at(AT_SAVE), verdict.at(AT_END)
    if loaded or later:
        console.print(f"  {'right after loading' if loaded else 'after the last step'}:", highlight=False)
    for d in loaded or later:
        first = f"rank {d.rank}, {d.place}: {_short(d.expected)} in (a), {_short(d.found)} in ({key})"
        console.print(f"    {d.title}: {d.differing} of {d.total}, first {escape(first)}", highlight=False)
    if loaded and later:
        titles = escape(", ".join(d.title for d in later))
        console.print(f"  after the last step differ: {titles}", highlight=False)


def _short(value: str) -> str:
    return value if len(value) <= 20 else f"{value[:12]}..."


def _plain(value: Any) -> Any:
    """JSON knows no infinities and no NaN: those become text."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
