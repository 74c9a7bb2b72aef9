"""What must be true after a death, read from the disk with nothing of the code under test but its file names."""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.torture.scenarios import AFTER, NEW, OLD, OLDER, Scenario

OLD_STATE, NEW_STATE = 2, 3  # micro batches that the old and the new checkpoint hold


def checkpoint_id(save_dir: Path, tag: str) -> str | None:
    """The id in a tag's manifest; None where there is no manifest (ValueError where it is no JSON)."""
    path = save_dir / tag / "nvme_resume" / "manifest.json"
    return str(json.loads(path.read_text())["body"]["checkpoint_id"]) if path.is_file() else None


def latest(save_dir: Path) -> str:
    """What ``latest`` says."""
    return (save_dir / "latest").read_text()


def newest_committed(scenario: Scenario, base: Path, folder: Path) -> tuple[set[int], list[str]]:
    """Which states a load may bring back, and what is wrong with what lies there.

    The new checkpoint counts as soon as it stands under its tag, and is the only right answer once ``latest`` names
    it; between these two renames, one system call apart, either is right.
    """
    save_dir = folder / "ck"
    if scenario.tag is None:
        return {OLD_STATE}, []
    found = checkpoint_id(save_dir, scenario.tag)
    if scenario.tag == NEW:
        if found is None:
            wrong = [f"latest names {NEW}, which is not there"] if latest(save_dir) == NEW else []
            return {OLD_STATE}, wrong
        return ({NEW_STATE} if latest(save_dir) == NEW else {OLD_STATE, NEW_STATE}), []
    if found is None:
        retired = [p for p in save_dir.glob(f".old-{OLD}.*") if checkpoint_id(save_dir, p.name)]
        return {OLD_STATE}, ([] if retired else [f"{OLD} is gone"])
    return ({OLD_STATE} if found == checkpoint_id(base / "ck", OLD) else {NEW_STATE}), []


def older_ones(scenario: Scenario, base: Path, folder: Path) -> list[str]:
    """Old checkpoints that are not byte for byte what they were, or gone without leave."""
    save_dir = folder / "ck"
    wrong = []
    kept = scenario.options.get("keep_last")
    there = [tag for tag in (OLDER, OLD, NEW, AFTER) if checkpoint_id(save_dir, tag) is not None]
    for tag, newer in ((OLDER, {OLD, NEW, AFTER}), (OLD, {NEW, AFTER})):
        if tag == scenario.tag:
            continue  # being replaced: what is loaded tells
        if not (save_dir / tag).is_dir():
            if kept is None or len(newer & set(there)) < kept or latest(save_dir) not in (NEW, AFTER):
                wrong.append(f"{tag} is gone")
            continue
        wrong += [f"{tag}/{name} differs" for name in _changed(base / "ck" / tag, save_dir / tag)]
    return wrong


def _changed(before: Path, now: Path) -> Iterable[str]:
    for path in sorted(p for p in before.rglob("*") if p.is_file()):
        relative = path.relative_to(before)
        if not (now / relative).is_file() or not filecmp.cmp(path, now / relative, shallow=False):
            yield str(relative)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# Harm that all of this must notice: done after a death, as a test of the test.
HARM: dict[str, Callable[[Path], None]] = {
    "a bit of the newest checkpoint": lambda save_dir: _flip(
        next((save_dir / OLD / "offloaded_tensors" / "rank00").glob("[0-9]*.swp"))
    ),
    "a bit of the older checkpoint": lambda save_dir: _flip(
        next((save_dir / OLDER / "offloaded_tensors" / "rank00").glob("exp_avg-*.swp"))
    ),
    "the newest checkpoint gone": lambda save_dir: shutil.rmtree(save_dir / OLD),
    "the older checkpoint gone": lambda save_dir: shutil.rmtree(save_dir / OLDER),
}


def left_behind(folder: Path, alive: set[int]) -> list[str]:
    """Unfinished names in the save folder, and private folders or locks of processes that are not ``alive``."""
    wrong = [
        f"left behind: {path.relative_to(folder)}"
        for path in sorted((folder / "ck").rglob("*"))
        if path.name.startswith((".tmp-", ".old-"))
    ]
    for path in sorted((folder / "nvme" / "zero_stage_3" / "nvme_resume").iterdir()):
        owner = path.name.split("-")[-2:-1]  # <host>-<pid>-<random>, with and without ".lock"
        if owner and owner[0].isdigit() and int(owner[0]) not in alive:
            wrong.append(f"left behind: {path.relative_to(folder)}")
    return wrong


def of_victims(
    scenario: Scenario, ends: list[Any], armed_rank: int, seconds_after: float | None
) -> list[str]:
    """Did the trap spring, and did the other rank end as it must?"""
    wrong = []
    for rank, end in enumerate(ends):
        report = end.report or {}
        if end.hung:
            wrong.append(f"rank {rank} hung")
        elif rank != armed_rank and end.killed:
            wrong.append(f"rank {rank} was killed, too")
        elif not end.killed and not report:
            wrong.append(f"rank {rank} ended without a word: {end.log[-300:]}")
        elif "error" in report and not (scenario.ranks > 1 and report.get("where") == "training"):
            # In training it is DeepSpeed's own collective that fails.
            wrong.append(f"rank {rank}: {report['error']}: {report['text'][:300]}")
        elif "named" in report and not any(e.killed for e in ends):
            wrong.append(f"rank {rank}: {report['named']} though nobody died: {report['text'][:300]}")
    limit = 2 * float(scenario.case("", seed=0)["nvme_checkpoint"]["timeout_seconds"])
    if seconds_after is not None and seconds_after > limit:
        wrong.append(f"the other rank ended {seconds_after:.1f} s after the death")
    return wrong


def of_survivors(
    scenario: Scenario, ends: list[Any], expected: list[dict[str, Any]], states: set[int]
) -> list[str]:
    """Did a fresh start take the newest committed state, equal to the bit, and could it go on?"""
    from tests.harness import differences

    wrong = []
    for rank, end in enumerate(ends):
        found = end.report
        if end.hung or found is None or "error" in found:
            wrong.append(f"fresh rank {rank}: {'hung' if end.hung else found or end.log[-600:]}")
            continue
        micro = found["micro"]
        if micro not in states:
            wrong.append(f"rank {rank} loaded the state after {micro} steps, not after {sorted(states)}")
            continue
        base = expected[rank]
        wrong += [f"rank {rank}{d}" for d in differences(base["states"][str(micro)], found["digests"])[:5]]
        if found["losses"] != base["losses"][micro : micro + 1]:
            wrong.append(f"rank {rank}: the next loss differs")
        if rank == 0:
            for tag, said in {**found["verified"], **found["verified_after"]}.items():
                if said not in ("hashes", "sizes"):
                    wrong.append(f"{tag}: {said}")
            if found["verified_after"].get(AFTER) != "hashes":
                wrong.append(f"the following save: {found['verified_after'].get(AFTER)}")
    return wrong
