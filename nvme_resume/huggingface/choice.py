"""``resume_from_checkpoint=True``: the newest checkpoint folder that is complete."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from nvme_resume import logs
from nvme_resume.config import Options
from nvme_resume.errors import CorruptError, NoCheckpointError
from nvme_resume.huggingface import rotation
from nvme_resume.nodes.supply import supply
from nvme_resume.peers import Peers
from nvme_resume.places import Places
from nvme_resume.storage import catalog, ownership
from nvme_resume.storage import disk as seam

log = logs.logger

_STATE = "trainer_state.json"  # transformers.trainer.TRAINER_STATE_NAME, written last
_LARGEST_STATE = 1 << 30  # bytes


def newest(output_dir: Path) -> Path | None:
    """The newest complete ``checkpoint-N`` as this process sees it, or None; says what was skipped and why."""
    logs.ensure_visible()  # there is no engine yet
    ownership.mend(output_dir)
    return _choose(output_dir, [_problems(output_dir)], {}, speak=True)


def newest_of_all(output_dir: Path, peers: Peers) -> Path | None:
    """The newest that is complete on every rank, the same on all.  Collective."""
    logs.ensure_visible()  # there is no engine yet
    peers.run(
        lambda: ownership.mend(output_dir), "look at the output folder"
    )  # one of them does; the others wait
    found, missing = _of_all(output_dir, peers)
    lost: dict[str, str] = {}  # what the nodes cannot make whole together, and why
    for name in reversed(rotation.by_step({n for of_rank in found for n in of_rank})):
        sound = [of_rank.get(name, "absent") is None for of_rank in found]
        if not all(sound):
            # Nodes with disks of their own: what one lacks another may have, and the other way round.
            try:
                beside = missing.get(name, [])
                supply(output_dir / name, None, peers, Places(peers), Options(), loose=True, beside=beside)
            except (CorruptError, NoCheckpointError) as error:
                lost[name] = str(error)
            found, missing = _of_all(output_dir, peers)
        if all(of_rank.get(name, "absent") is None for of_rank in found):
            break
    return _choose(output_dir, found, lost, speak=peers.rank == 0)


def problem_with(folder: Path) -> str | None:
    """Why a ``checkpoint-N`` folder is not complete; None when it is, as far as records and sizes tell."""
    if (folder / catalog.INCOMPLETE).exists():
        return f"{catalog.INCOMPLETE} is there"
    state = folder / _STATE
    if not state.is_file():
        return f"no {_STATE}: its save did not finish"
    try:
        json.loads(seam.current().read(state, _LARGEST_STATE))
    except (OSError, ValueError, RecursionError) as error:
        return f"{_STATE} cannot be read: {error}"
    tags = catalog.tags(folder)
    rank = int(os.environ.get("RANK", "0"))
    problem = None
    for tag in reversed(tags):  # one, unless somebody else saves there, too
        found = catalog.look(folder, tag, catalog.share_here(folder, tag, rank))
        if found.problem is None:  # ours, or plain DeepSpeed's
            return None
        problem = problem or found.problem
    return problem


def _problems(output_dir: Path) -> dict[str, str | None]:
    """The checkpoint folders there are, and what is wrong with each."""
    if not output_dir.is_dir():
        return {}
    names = rotation.by_step(p.name for p in output_dir.iterdir() if p.is_dir())
    return {name: problem_with(output_dir / name) for name in names}


def _of_all(output_dir: Path, peers: Peers) -> tuple[list[dict[str, str | None]], dict[str, list[str]]]:
    """What every rank finds wrong with each folder, and the files that this one misses and another has.  Collective.

    Without its random states a rank would go on with others, and the Trainer only says so.
    """

    def look() -> tuple[dict[str, str | None], dict[str, list[str]]]:
        problems = _problems(output_dir)
        return problems, {name: _wanted_files(output_dir / name) for name in problems}

    said = peers.run(look, "choice of the checkpoint")
    found: list[dict[str, str | None]] = []
    mine: dict[str, list[str]] = {}
    for rank, (problems, there) in enumerate(said):
        found.append(dict(problems))
        for name, files in there.items():
            known = {file for _, others in said for file in others.get(name, [])}
            missing = sorted(known & {_STATE, f"rng_state_{rank}.pth"} - set(files))
            if missing and found[rank][name] is None:
                found[rank][name] = f"no {missing[0]}"
            if rank == peers.rank:
                mine[name] = missing
    return found, mine


def _wanted_files(folder: Path) -> list[str]:
    """Files of the Trainer in a folder that a resume needs: its state, and the random states of ranks."""
    return sorted(p.name for p in folder.iterdir() if p.name == _STATE or p.match("rng_state_*.pth"))


def _choose(
    output_dir: Path, of_ranks: list[dict[str, str | None]], lost: Mapping[str, str], *, speak: bool
) -> Path | None:
    skipped: list[str] = []
    chosen: str | None = None
    for name in reversed(rotation.by_step({n for found in of_ranks for n in found})):
        absent = [rank for rank, found in enumerate(of_ranks) if name not in found]
        known = [lost.get(name), *(found.get(name) for found in of_ranks)]
        problem = next((p for p in known if p is not None), None)
        if problem is None and absent:
            problem = f"ranks {absent} do not have it"
        if problem is None:
            chosen = name
            break
        skipped.append(f"{name} ({problem})")
    if skipped and speak:
        log.warning(
            "%s; skipped: %s",
            f"resuming from {output_dir / chosen}"
            if chosen
            else f"no checkpoint in {output_dir} is complete",
            "; ".join(skipped),
        )
    return None if chosen is None else output_dir / chosen
