"""What the forked processes do: make the base, do a scenario (and die in it), or go on after a death."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests import training
from tests.torture.kill import Armed, Trap
from tests.torture.scenarios import AFTER, OLD, OLDER, Scenario

SAVED_AFTER = {OLDER: 1, OLD: 2}  # micro batches before each checkpoint of the base
LAST = 5


def save(engine: Any, folder: Path, tag: str, micro: int) -> None:
    engine.save_checkpoint(str(folder), tag=tag, client_state={"micro": micro})


def make_base(scenario: Scenario, folder: Path, rank: int) -> dict[str, Any]:
    """One uninterrupted run that saves t1 and t2; its states and losses are what must come back."""
    training.WIDTH = scenario.width
    case = scenario.case(str(folder / "nvme"), seed=1) | {"nvme_checkpoint": {}}
    engine = training.make_engine(case)
    states, losses = {}, []
    for micro in range(LAST):
        losses += training.train(case, engine, rank, micro, micro + 1)
        states[micro + 1] = training.digests(engine)
        for tag, at in SAVED_AFTER.items():
            if micro + 1 == at:
                save(engine, folder / "ck", tag, at)
                engine.wait_for_checkpoint()
    return {"states": states, "losses": losses}


def victim(scenario: Scenario, folder: Path, rank: int, armed_rank: int, trap: Trap | None) -> dict[str, Any]:
    """Do the scenario with a trap set on one rank; what was counted if nobody died."""
    from nvme_resume import NvmeResumeError

    training.WIDTH = scenario.width
    case = scenario.case(str(folder / "nvme"), seed=5)
    mine = trap if rank == armed_rank else None
    armed: Armed | None = None
    if scenario.armed_at == "start":
        armed = Armed(mine, folder / "where", exchanges=scenario.exchanges)
    start, where = time.monotonic(), "loading"
    try:
        engine = training.make_engine(case)
        _, state = engine.load_checkpoint(str(folder / "ck"))
        micro = int(state["micro"])
        if scenario.tag is not None:
            training.train(case, engine, rank, micro, micro + 1)
            micro += 1
            armed = Armed(mine, folder / "where", exchanges=scenario.exchanges)
            start, where = time.monotonic(), "saving"
            save(engine, folder / "ck", scenario.tag, micro)
        where = "training"
        training.train(case, engine, rank, micro, micro + scenario.trained)
        where = "waiting"
        engine.wait_for_checkpoint()
    except NvmeResumeError as error:
        return {
            "named": type(error).__name__,
            "text": str(error)[:500],
            "seconds": round(time.monotonic() - start, 2),
            "where": where,
        }
    except RuntimeError as error:  # a collective of DeepSpeed's own
        return {"error": type(error).__name__, "text": str(error)[:500], "where": where}
    return {"counted": armed.counted() if armed is not None and trap is not None and trap.n == 0 else {}}


def survivor(scenario: Scenario, folder: Path, rank: int) -> dict[str, Any]:
    """A fresh start: load, compare, go on for a step, save once more, verify all that is there."""
    training.WIDTH = scenario.width
    case = scenario.case(str(folder / "nvme"), seed=77)
    save_dir = folder / "ck"
    engine = training.make_engine(case)
    path, state = engine.load_checkpoint(str(save_dir))
    micro = int(state["micro"])
    found: dict[str, Any] = {
        "tag": Path(str(path)).parent.name if Path(str(path)).is_file() else Path(str(path)).name,
        "micro": micro,
        "digests": training.digests(engine),
        "losses": training.train(case, engine, rank, micro, micro + 1),
    }
    engine.wait_for_checkpoint()
    if rank == 0:
        found["verified"] = verify_all(save_dir)
    save(engine, save_dir, AFTER, micro + 1)
    engine.wait_for_checkpoint()
    if rank == 0:
        found["verified_after"] = verify_all(save_dir)
    return found


def verify_all(save_dir: Path) -> dict[str, str]:
    """Every checkpoint there: "hashes" where all of its bytes were hashed and agree, or what is wrong."""
    from nvme_resume import NvmeResumeError
    from nvme_resume.config import Options
    from nvme_resume.storage import catalog, records, verify

    said = {}
    for tag in catalog.tags(save_dir):
        try:
            head = records.read_manifest(save_dir / tag)
            kinds = set()
            for rank in range(head.world_size):
                record, seal, _ = records.read_rank(save_dir / tag, head, rank)
                if seal is None:
                    verify.structure(save_dir / tag, record.files, rank=rank, tag=tag)
                    kinds.add("sizes")
                else:
                    verify.full(save_dir / tag, seal.files, Options(), rank=rank, tag=tag)
                    kinds.add("hashes")
            said[tag] = " and ".join(sorted(kinds))
        except NvmeResumeError as error:
            said[tag] = f"{type(error).__name__}: {error}"
    return said
