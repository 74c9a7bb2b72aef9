"""Kill processes at many points and check what is left: ``python -m tests.torture.run --points 2000 --out FILE.json``.

Exit code 1 when any point is not as it must be, or nothing died.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.torture import evidence, forks, scenarios
from tests.torture.kill import Trap
from tests.torture.points import Point, every, spread
from tests.torture.scenarios import Scenario

_SECONDS = 60.0  # for one process of a point; the slowest that ends waits for two timeouts
Task = Callable[[Path], dict[str, Any]]


def in_workers(tasks: Sequence[Task], jobs: int, work: Path, until: float) -> list[dict[str, Any]]:
    """Do the tasks, ``jobs`` at a time, in processes as pristine as this one; none is begun after ``until``."""
    reader, writer = os.pipe()  # the numbers of the tasks: whoever is free takes the next
    os.set_blocking(reader, False)
    numbers = memoryview(b"".join(n.to_bytes(4, "little") for n in range(len(tasks))))

    def worker(index: int) -> dict[str, Any]:
        os.close(writer)
        found = []
        os.set_blocking(reader, True)
        while time.monotonic() < until and (number := os.read(reader, 4)):
            n = int.from_bytes(number, "little")
            folder = work / f"{index}-{n}"
            folder.mkdir()
            try:
                found.append({**tasks[n](folder), "order": n})
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        return {"found": found}

    children = [forks.Child(partial(worker, index), work / f"worker-{index}.json") for index in range(jobs)]
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as stream:
        try:
            while numbers:
                numbers = numbers[stream.write(numbers) or 0 :]
        except BrokenPipeError:
            pass  # out of time
    results: list[dict[str, Any]] = []
    for child in children:
        end = child.wait(time.monotonic() + 24 * 3600)
        if end.report is None or "found" not in end.report:
            raise RuntimeError(f"a worker failed: {end.report} {end.log}")
        results += end.report["found"]
        child.forget()
    return sorted(results, key=lambda r: r["order"])


def base_of(scenario: Scenario, work: Path) -> Path:
    """The folder of a scenario's base."""
    return work / f"base-{scenario.base}"


def make_base(scenario: Scenario, work: Path) -> None:
    """Two checkpoints and the swap folder of the process that made them and died."""
    from tests.torture import actors

    base = base_of(scenario, work)
    base.mkdir()
    ends = forks.side_by_side(
        lambda rank: actors.make_base(scenario, base, rank), scenario.ranks, base, "base", _SECONDS
    )
    if any(e.report is None or "error" in e.report for e in ends):
        raise RuntimeError(f"the base could not be made: {[(e.report, e.log) for e in ends]}")
    (base / "expected.json").write_text(json.dumps([e.report for e in ends]))
    if not scenario.sealed:
        for seal in (base / "ck" / scenarios.OLD).glob("nvme_resume/*.seal.json"):
            seal.unlink()


def attempt(scenario: Scenario, base: Path, folder: Path, rank: int, trap: Trap) -> list[forks.End]:
    """A copy of the base (no links: inodes of its own), and the scenario in it with a trap."""
    from tests.torture import actors

    for name in ("ck", "nvme"):
        shutil.copytree(base / name, folder / name)
    return forks.side_by_side(
        lambda r: actors.victim(scenario, folder, r, rank, trap), scenario.ranks, folder, "victim", _SECONDS
    )


def count(scenario: Scenario, work: Path, folder: Path) -> dict[str, Any]:
    """What an undisturbed scenario calls, on each rank."""
    ends = attempt(scenario, base_of(scenario, work), folder, 0, Trap("disk"))
    wrong = evidence.of_victims(scenario, ends, 0, None)
    if wrong:
        raise RuntimeError(f"{scenario.name}, undisturbed: {wrong}: {[e.log for e in ends]}")
    return {"scenario": scenario.name, "counted": [(e.report or {})["counted"] for e in ends]}


def count_native(scenario: Scenario, rank: int, work: Path, folder: Path) -> dict[str, Any]:
    """How many calls the native copier makes: it cannot be asked, so it is killed at the n-th for some n."""

    def dies(n: int) -> bool:
        place = folder / str(n)
        place.mkdir()
        ends = attempt(scenario, base_of(scenario, work), place, rank, Trap("native", n))
        shutil.rmtree(place)
        return ends[rank].killed

    low, high = 0, 32
    while dies(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if dies(middle) else (low, middle)
    return {"scenario": scenario.name, "rank": rank, "native": low}


def kill(point: Point, work: Path, folder: Path) -> dict[str, Any]:
    """One point: a death, what lies there, a fresh start."""
    from tests.torture import actors

    scenario = scenarios.BY_NAME[point.scenario]
    start = time.monotonic()
    base = base_of(scenario, work)
    ends = attempt(scenario, base, folder, point.rank, point.trap)
    died = ends[point.rank].killed
    note = folder / "where"
    others = [folder / f"victim.{r}.json" for r in range(scenario.ranks) if r != point.rank]
    late = None
    if died and point.trap.kind != "native" and others and others[0].is_file():
        late = others[0].stat().st_mtime - note.stat().st_mtime
    wrong = evidence.of_victims(scenario, ends, point.rank, late)
    if point.harm:
        evidence.HARM[point.harm](folder / "ck")
    states, more = evidence.newest_committed(scenario, base, folder)
    wrong += [*more, *evidence.older_ones(scenario, base, folder)]
    fresh = forks.side_by_side(
        lambda r: actors.survivor(scenario, folder, r), scenario.ranks, folder, "fresh", _SECONDS
    )
    expected = json.loads((base / "expected.json").read_text())
    wrong += evidence.of_survivors(scenario, fresh, expected, states)
    if not wrong:
        wrong += evidence.older_ones(scenario, base, folder)
        wrong += evidence.left_behind(folder, {e.pid for e in fresh})
    report = fresh[0].report or {}
    return {
        **point.plain(),
        "died": died,
        "at": note.read_text() if died and note.is_file() else None,
        "others": [
            (e.report or {}).get("named") or (e.report or {}).get("error") or "finished"
            for r, e in enumerate(ends)
            if r != point.rank
        ],
        "others_seconds": None if late is None else round(late, 2),
        "loaded": {evidence.OLD_STATE: "old", evidence.NEW_STATE: "new"}.get(report.get("micro", 0)),
        "allowed": sorted(states),
        "ok": not wrong,
        "wrong": wrong,
        "log": [e.log for e in [*ends, *fresh]] if wrong else [],
        "seconds": round(time.monotonic() - start, 2),
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """A row for each scenario."""
    head = (
        "scenario",
        "deaths",
        "disk",
        "native",
        "files of DeepSpeed",
        "old state",
        "new state",
        "not reached",
        "wrong",
    )
    rows = []
    for name in [s.name for s in scenarios.ALL] + ["all"]:
        mine = [r for r in results if name in (r["scenario"], "all")]
        if not mine:
            continue
        dead = [r for r in mine if r["died"]]
        kinds = Counter(r["kind"] for r in dead)
        loaded = Counter(r["loaded"] for r in dead)
        rows.append(
            (
                name,
                len(dead),
                kinds["disk"],
                kinds["native"],
                kinds["stock"],
                loaded["old"],
                loaded["new"],
                len(mine) - len(dead),
                sum(not r["ok"] for r in mine),
            )
        )
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(str(c) for c in line) + " |" for line in lines)


def plan(chosen: Sequence[Scenario], work: Path, jobs: int, native: int) -> list[Point]:
    """All points there are."""
    no_end = float("inf")
    bases = {s.base: s for s in chosen}.values()
    in_workers([lambda _, s=s: make_base(s, work) or {} for s in bases], jobs, work, no_end)
    counts = in_workers([partial(count, s, work) for s in chosen], jobs, work, no_end)
    where = [(s, rank) for s in chosen for rank in range(s.ranks)]
    if native:
        known = {(s.name, rank): native for s, rank in where}
    else:
        tasks = [partial(count_native, s, rank, work) for s, rank in where]
        known = {(n["scenario"], n["rank"]): n["native"] for n in in_workers(tasks, jobs, work, no_end)}
    return [
        point
        for found in counts
        for rank, counted in enumerate(found["counted"])
        for point in every(found["scenario"], rank, counted, known[found["scenario"], rank])
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=2000, help="how many; 0: every one")
    parser.add_argument("--seed", type=int, default=0, help="which, where not every one is taken")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=0, help="begin no point after that; 0: no limit")
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    parser.add_argument("--call", default="", help="calls that contain this, as in 'rename t3/'")
    parser.add_argument("--native", type=int, default=0, help="calls of the copier to try, not counted first")
    parser.add_argument(
        "--dir", type=Path, default=None, help="where to work (default: the temporary folder)"
    )
    parser.add_argument("--out", type=Path, required=True, help="the JSON report")
    options = parser.parse_args(arguments)
    os.environ |= forks.ENVIRONMENT
    start = time.monotonic()
    forks.preload()
    chosen = [s for s in scenarios.ALL if options.only in s.name]
    work = Path(tempfile.mkdtemp(prefix="torture-", dir=options.dir))
    try:
        points = plan(chosen, work, options.jobs, options.native)
        points = [p for p in points if options.call in p.operation]
        taken = spread(points, options.points or len(points), options.seed)
        planned = time.monotonic() - start
        print(
            f"{len(taken)} of {len(points)} points in {len(chosen)} scenarios; planned in {planned:.0f} s",
            flush=True,
        )
        until = start + options.minutes * 60 if options.minutes else float("inf")
        first = Trap("disk", 1)
        controls = [Point(chosen[0].name, 0, first, harm=harm) for harm in evidence.HARM]
        tried = in_workers([partial(kill, p, work) for p in [*controls, *taken]], options.jobs, work, until)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    seconds = time.monotonic() - start
    results = [r for r in tried if not r["harm"]]
    unnoticed = [r["harm"] for r in tried if r["harm"] and r["ok"]]
    report = {
        "points": len(points),
        "seed": options.seed,
        "jobs": options.jobs,
        "planned_seconds": round(planned, 1),
        "seconds": round(seconds, 1),
        "scenarios": [s.name for s in chosen],
        "controls": [r for r in tried if r["harm"]],
        "results": results,
    }
    options.out.write_text(json.dumps(report, indent=1))
    print(table(results))
    for bad in [r for r in results if not r["ok"]][:20]:
        where = f"{bad['kind']} {bad['n']} {bad['when']} ({bad['at']})"
        print(f"{bad['scenario']}, rank {bad['rank']}, {where}: {bad['wrong'][0]}")
    for harm in unnoticed:
        print(f"not noticed: {harm}")
    lasted = [r["others_seconds"] for r in results if r["others_seconds"] is not None]
    if lasted:
        print(f"the other rank ended at most {max(lasted):.1f} s after the death of one")
    print(f"{len(results)} points in {seconds:.0f} s")
    good = any(r["died"] for r in results) and all(r["ok"] for r in results) and not unnoticed
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
