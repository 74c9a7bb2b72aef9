"""The check itself: which phases run in which order, and what becomes of their answers."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from nvme_resume.consistency import compare, launch, plot, settings, spec
from nvme_resume.consistency.compare import Run
from nvme_resume.consistency.report import Report
from nvme_resume.consistency.settings import Settings
from nvme_resume.consistency.spec import Spec
from nvme_resume.errors import ConfigError

REPORT, CURVES = "report.json", "losses.png"
SWAP, CHECKPOINT = "nvme_resume-check-", "checkpoint"


class Check:
    """One check in its work folder."""

    def __init__(self, wanted: Settings, console: Console) -> None:
        wanted.validate()
        self.settings = wanted
        self.console = console
        self.base = settings.base_config(wanted)
        places = launch.accelerator_count()
        if 0 < places < wanted.ranks:
            raise ConfigError(
                "each rank needs an accelerator of its own", expected=f"<= {places}", found=wanted.ranks
            )
        self.out = wanted.out.absolute()
        self.out.mkdir(parents=True, exist_ok=True)
        place = (wanted.nvme_path or self.out).absolute()
        place.mkdir(parents=True, exist_ok=True)
        # A folder of our own where the user may share with others: only this is ever emptied.
        self.swap = Path(tempfile.mkdtemp(prefix=SWAP, dir=place))

    def run(self) -> Report:
        """All runs, the comparison, the files."""
        runs = {"a": self._uninterrupted(), "b": self._resumed("b", "nvme_resume", extension=True)}
        if self.settings.compare_stock:
            runs["c"] = self._resumed("c", "plain DeepSpeed", extension=False)
        stop, steps = self.settings.stop, self.settings.steps
        verdicts = {
            key: compare.compare(runs["a"], run, save_at=stop, steps=steps)
            for key, run in runs.items()
            if key != "a"
        }
        report = Report(
            settings=_plain_settings(self.settings),
            config=self.base,
            runs=runs,
            verdicts=verdicts,
            save_at=stop,
            steps=steps,
            tolerance=self.settings.tolerance,
            files={
                "work folder": str(self.out),
                "report": str(self.out / REPORT),
                "curves": str(self.out / CURVES),
            },
        )
        plot.draw(self.out / CURVES, runs, save_at=stop, title=_title(report))
        report.write(self.out / REPORT)
        self._clean_up(report.passed)
        return report

    def _uninterrupted(self) -> Run:
        run = Run("uninterrupted")
        steps = self.settings.steps
        self._phase(
            run, "a", "a", self._spec("a", last_step=steps, digests_after=(self.settings.stop, steps))
        )
        return run

    def _resumed(self, key: str, name: str, *, extension: bool) -> Run:
        run = Run(name)
        steps, checkpoint = self.settings.steps, str(self.out / key / CHECKPOINT)
        first = self._spec(key, last_step=self.settings.stop, extension=extension, save=checkpoint)
        self._phase(run, key, f"{key}-save", first)
        # Another seed: weights and random states that were not restored must not pass for restored ones.
        second = self._spec(
            key,
            seed=self.settings.seed + 1,
            last_step=steps,
            extension=extension,
            load=checkpoint,
            digests_loaded=True,
            digests_after=(steps,),
        )
        self._phase(run, key, f"{key}-resume", second)
        return run

    def _spec(self, key: str, *, extension: bool = False, **order: Any) -> Spec:
        nvme_path = None if self.settings.keep_nvme_path else self.swap / key
        order = {"seed": self.settings.seed, **order}
        return Spec(
            folder="",
            factory=self.settings.factory,
            config=settings.run_config(self.base, nvme_path, extension=extension),
            extension=extension,
            **order,
        )

    def _phase(self, run: Run, key: str, name: str, order: Spec) -> None:
        """One set of fresh processes; their answers are added to ``run``."""
        folder = self.out / name
        folder.mkdir(parents=True)
        if not self.settings.keep_nvme_path:
            # What an earlier phase swapped must not help the next one.
            shutil.rmtree(self.swap / key, ignore_errors=True)
            (self.swap / key).mkdir(parents=True)
        order = dataclasses.replace(order, folder=str(folder))
        begun = time.monotonic()
        first_step = 1 if order.load is None else self.settings.stop + 1
        progress = self._progress()
        with progress or nullcontext():
            if progress is not None:
                task = progress.add_task(f"({key}) {name}", total=order.last_step - first_step + 1)
            else:
                self.console.print(
                    f"{name}: {self.settings.ranks} rank(s), steps {first_step} to {order.last_step}"
                )

            def on_step(done: int) -> None:
                if progress is not None:
                    progress.update(task, completed=done)

            events = launch.run(order, self.settings.ranks, self.settings.timeout, on_step)
        run.seconds[name] = round(time.monotonic() - begun, 2)
        if progress is None:
            self.console.print(f"{name}: done in {run.seconds[name]:.1f} s")
        collect(run, events)

    def _progress(self) -> Progress | None:
        """A moving bar for a terminal, None for a file or a pipe."""
        if not self.console.is_terminal:
            return None
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        return Progress(*columns, TimeElapsedColumn(), console=self.console)

    def _clean_up(self, passed: bool) -> None:
        """Swap files and checkpoints may be large.  Those of a failed check are evidence and stay."""
        if self.settings.keep or not passed:
            return
        shutil.rmtree(self.swap, ignore_errors=True)
        for key in ("b", "c"):
            shutil.rmtree(self.out / key, ignore_errors=True)


def collect(run: Run, ranks: list[list[dict[str, Any]]]) -> None:
    """Add the events of all ranks of a phase to a run."""
    for events in ranks:
        for event in events:
            if event["event"] == spec.STEP:
                step = event["step"]
                run.losses.setdefault(step, []).append(event["losses"])
                run.lr.setdefault(step, []).append(event["lr"])
                run.data.setdefault(step, []).append(event["data"])
            elif event["event"] == spec.DIGESTS:
                run.digests.setdefault(event["when"], []).append(event["digests"])


def _plain_settings(wanted: Settings) -> dict[str, Any]:
    found = {f.name: getattr(wanted, f.name) for f in dataclasses.fields(wanted)}
    return {k: str(v) if isinstance(v, Path) else v for k, v in found.items()} | {"save_at": wanted.stop}


def _title(report: Report) -> str:
    lines = [f"Resume check: {report.steps} steps, saved after step {report.save_at}"]
    for key, verdict in report.verdicts.items():
        lines.append(f"({key}) {verdict.run}: {'equal to the last bit' if verdict.equal else 'different'}")
    return "\n".join([lines[0], ";  ".join(lines[1:])])
