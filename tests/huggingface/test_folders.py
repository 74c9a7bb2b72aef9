"""A ``checkpoint-N`` folder is there whole or not at all: several ranks, several "nodes", deaths, signals."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from nvme_resume import last_resumable
from nvme_resume.storage import audit
from tests.huggingface import runs

DDP = {"deepspeed": False, "steps": 30, "arguments": {"save_steps": 2, "save_total_limit": 2}}
# A Python with transformers 4.38.2: scripts/old_transformers makes one.
OLD = os.environ.get("NVME_RESUME_OLD_TRANSFORMERS")


def complete(folder: Path, ranks: int) -> None:
    names = {p.name for p in folder.iterdir()}
    wanted = {"trainer_state.json", "optimizer.pt", "scheduler.pt", "training_args.bin", "model.safetensors"}
    states = {f"rng_state_{rank}.pth" for rank in range(ranks)} if ranks > 1 else {"rng_state.pth"}
    assert wanted | states <= names, names
    state = json.loads((folder / "trainer_state.json").read_text())
    assert state["global_step"] == int(folder.name.rpartition("-")[2])
    assert ".tmp-" not in json.dumps(state)


def ends_with(out: Path, names: list[str], ranks: int) -> None:
    assert runs.checkpoints(out) == names
    for name in names:
        complete(out / name, ranks)


def test_four_ranks_save_and_rotate(tmp_path: Path) -> None:
    _, log = runs.run(tmp_path, "ddp", 4, **DDP)
    ends_with(tmp_path / "out", ["checkpoint-28", "checkpoint-30"], 4)
    lines = [line for line in log.splitlines() if "[nvme_resume]" in line]
    assert len(lines) <= 15 and all("checkpoint-" in line for line in lines), lines
    assert f"committed {tmp_path}/out/checkpoint-30: step 30, " in log


@pytest.mark.huggingface
@pytest.mark.parametrize("turn", range(20))
def test_twenty_times(tmp_path: Path, turn: int) -> None:
    runs.run(tmp_path, "ddp", 4, **DDP)
    ends_with(tmp_path / "out", ["checkpoint-28", "checkpoint-30"], 4)


@pytest.mark.parametrize("each_node", [False, True], ids=["", "save_on_each_node"])
@pytest.mark.parametrize(
    "python",
    [
        "here",
        pytest.param("4.38.2", marks=[
            pytest.mark.huggingface, pytest.mark.skipif(not OLD, reason="NVME_RESUME_OLD_TRANSFORMERS is not set")
        ]),
    ],
)  # fmt: skip
def test_two_nodes_with_one_folder(tmp_path: Path, python: str, each_node: bool) -> None:
    """LOCAL_RANK is 0 in both.  The Trainer of 4.38.2 alone leaves no checkpoint, or wrong ones."""
    how = {"python": str(OLD)} if python != "here" else {}
    arguments = {**DDP["arguments"], "save_on_each_node": each_node}  # type: ignore[dict-item]
    case: dict[str, Any] = {**DDP, "arguments": arguments}
    last = case["steps"]
    runs.run(tmp_path, "nodes", 2, nodes=True, **how, **case)
    ends_with(tmp_path / "out", sorted([f"checkpoint-{last - 2}", f"checkpoint-{last}"]), 2)


@pytest.mark.parametrize(
    ("each_node", "node_local"),
    [
        (True, True),
        pytest.param(False, False, marks=pytest.mark.huggingface),
        pytest.param(True, False, marks=pytest.mark.huggingface),
        pytest.param(False, True, marks=pytest.mark.huggingface),
    ],
)
def test_two_nodes_with_one_folder_and_zero3(tmp_path: Path, each_node: bool, node_local: bool) -> None:
    """The newest transformers only: accelerate 0.27.2 takes DeepSpeed for something that has GPUs."""
    arguments = {"save_steps": 2, "save_total_limit": 2, "save_on_each_node": each_node}
    case: dict[str, Any] = {"steps": 6, "arguments": arguments, "node_local": node_local}
    whole, _ = runs.run(tmp_path, "nodes", 2, nodes=True, **case)
    out = tmp_path / "out"
    assert runs.checkpoints(out) == ["checkpoint-4", "checkpoint-6"]
    for step in (4, 6):
        assert last_resumable(out / f"checkpoint-{step}") == out / f"checkpoint-{step}" / f"global_step{step}"
    shutil.rmtree(out / "checkpoint-6")
    resumed, _ = runs.run(tmp_path, "resumed", 2, nodes=True, **case, seed=2, resume=True)
    assert resumed["logs"] == whole["logs"]
    assert runs.checkpoints(out) == ["checkpoint-4", "checkpoint-6"]


def test_two_nodes_with_folders_of_their_own(tmp_path: Path) -> None:
    """Each gets what a resume there needs, whatever ``save_on_each_node`` says."""
    case = {**DDP, "steps": 6, "arguments": {"save_steps": 2, "save_total_limit": 1}}
    runs.run(tmp_path, "apart", 2, nodes=True, **case, private=True)
    for rank in (0, 1):
        out = tmp_path / f"out-of-{rank}" / "out"
        assert runs.checkpoints(out) == ["checkpoint-6"]
        names = {p.name for p in (out / "checkpoint-6").iterdir()}
        assert {"trainer_state.json", "model.safetensors", f"rng_state_{rank}.pth"} <= names
    shutil.rmtree(tmp_path / "out-of-1" / "out" / "checkpoint-6")
    _, log = runs.run(tmp_path, "lost", 2, nodes=True, codes=[1, 1], **case, private=True, resume=True)
    assert "checkpoint-6 (ranks [1] do not have it)" in log


def test_a_node_with_a_new_disk(tmp_path: Path) -> None:
    """The master has gathered whole folders, and gives them back, the Trainer's own files included."""
    case = {
        "steps": 6,
        "nvme_checkpoint": {"gather": "main"},
        "private": True,
        "node_local": True,
        "arguments": {"save_steps": 2, "save_total_limit": 2, "logging_steps": 1},
    }
    whole, log = runs.run(tmp_path, "whole", 2, nodes=True, **case, ends_as_usual=True)
    first, second = (tmp_path / f"out-of-{rank}" / "out" for rank in (0, 1))
    assert {p.name for p in (first / "checkpoint-6").iterdir()} >= {"rng_state_0.pth", "rng_state_1.pth"}, log
    for step in (4, 6):
        audit.check(first / f"checkpoint-{step}" / f"global_step{step}", "full")
        assert not list((second / f"checkpoint-{step}").rglob("rank00.json"))

    shutil.rmtree(first / "checkpoint-6")
    shutil.rmtree(second.parent)
    resumed, _ = runs.run(tmp_path, "resumed", 2, nodes=True, **case, seed=2, resume=True)
    assert resumed["logs"] == whole["logs"]
    names = {p.name for p in (second / "checkpoint-4").iterdir()}
    assert {"rng_state_1.pth", "trainer_state.json", "latest"} <= names
    assert not list((second / "checkpoint-4").rglob("rank00.json"))

    # A file of the Trainer alone is missing; without it the losses would be others.
    for out in (first, second):
        shutil.rmtree(out / "checkpoint-6")
    (second / "checkpoint-4" / "rng_state_1.pth").unlink()
    (first / "checkpoint-4" / "trainer_state.json").unlink()  # each has what the other one misses
    resumed, log = runs.run(tmp_path, "again", 2, nodes=True, **case, seed=3, resume=True)
    assert resumed["logs"] == whole["logs"]
    assert "gets files beside it from" in (tmp_path / "log-again.0.txt").read_text()


def test_the_last_whole_folder_outlives_the_limit(tmp_path: Path) -> None:
    """While newer ones are on their way to the master, over a link that is slower than the saves."""
    case: dict[str, Any] = {"private": True, "node_local": True}
    arguments = {"save_steps": 2, "save_total_limit": 1}
    quick = {"gather": "main"}
    runs.run(
        tmp_path, "one", 2, nodes=True, **case, steps=2, arguments=arguments, nvme_checkpoint=quick,
        ends_as_usual=True,
    )  # fmt: skip
    slow = {**quick, "network_limit_mib": 0.2, "timeout_seconds": 60}
    _, log = runs.run(
        tmp_path, "two", 2, nodes=True, **case, steps=16, arguments=arguments, nvme_checkpoint=slow, seed=2,
        resume=True,
    )  # fmt: skip
    assert "does not go to other nodes" in log
    first, second = (tmp_path / f"out-of-{rank}" / "out" for rank in (0, 1))
    audit.check(first / "checkpoint-2" / "global_step2", "full")
    assert "checkpoint-16" in runs.checkpoints(first) and len(runs.checkpoints(first)) <= 6
    shutil.rmtree(second.parent)
    runs.run(
        tmp_path, "three", 2, nodes=True, **case, steps=3, arguments=arguments, nvme_checkpoint=quick, seed=2,
        resume=True,
    )  # fmt: skip
    said = (tmp_path / "log-three.0.txt").read_text()
    assert "[nvme_resume] resuming from out/checkpoint-2; skipped: checkpoint-16 (" in said, said
    assert "no node has the files of ranks [1]" in said


@pytest.mark.parametrize("in_background", [False, True], ids=["", "async"])
def test_whole_folders_are_uploaded(tmp_path: Path, in_background: bool) -> None:
    """What lies under the URL, copied back, resumes."""
    bucket = tmp_path / "bucket"
    options = {"upload": bucket.as_uri(), **({"async": True, "method": "direct"} if in_background else {})}
    case = {"steps": 6, "nvme_checkpoint": options, "arguments": {"logging_steps": 1}}
    whole, log = runs.run(tmp_path, "whole", 2, **case, ends_as_usual=True)
    for step in (3, 6):
        folder = bucket / f"checkpoint-{step}"
        names = {p.name for p in folder.iterdir()}
        assert {"trainer_state.json", "rng_state_0.pth", "rng_state_1.pth", "latest"} <= names, log
        audit.check(folder / f"global_step{step}", "full")
    again = tmp_path / "again"
    shutil.copytree(bucket / "checkpoint-3", again / "checkpoint-3")
    del case["nvme_checkpoint"]
    resumed, _ = runs.run(tmp_path, "resumed", 2, **case, out=str(again), seed=2, resume=True)
    assert resumed["logs"] == whole["logs"]


@pytest.mark.parametrize("deepspeed", [False, True], ids=["ddp", "zero3"])
def test_killed_in_a_save(tmp_path: Path, deepspeed: bool) -> None:
    """The next start resumes from the checkpoint before, and the folder that was being built goes."""
    case: dict[str, Any] = {
        "deepspeed": deepspeed, "steps": 6, "arguments": {"save_steps": 2, "save_total_limit": 2},
    }  # fmt: skip
    whole, _ = runs.run(tmp_path, "whole", 2, **case, out=str(tmp_path / "whole"))
    runs.run(tmp_path, "killed", 2, **case, die_in_save_at=[4, 1], codes=[1, 9])
    out = tmp_path / "out"
    assert runs.checkpoints(out)[-1] == "checkpoint-2" and len(runs.checkpoints(out)) <= 2
    resumed, _ = runs.run(tmp_path, "resumed", 2, **case, seed=2, resume=True)
    assert resumed["logs"] == whole["logs"]
    assert runs.checkpoints(out) == ["checkpoint-4", "checkpoint-6"]


def test_sigterm_ends_with_a_checkpoint(tmp_path: Path) -> None:
    """A spot instance is taken away: one rank hears of it."""
    case = {"deepspeed": False, "steps": 8, "arguments": {"save_steps": 100}}
    whole, _ = runs.run(tmp_path, "whole", 2, **case, out=str(tmp_path / "whole"))
    _, log = runs.run(tmp_path, "told", 2, **case, sigterm_at=[5, 1], options=("--save-on-sigterm",))
    assert runs.checkpoints(tmp_path / "out") == ["checkpoint-5"]
    assert "SIGTERM: saving at step 5" in log
    resumed, _ = runs.run(tmp_path, "resumed", 2, **case, seed=2, resume=True)
    assert resumed["logs"] == whole["logs"]


BEST = {"save_steps": 2, "eval_steps": 2, "eval_strategy": "steps", "save_total_limit": 1,
        "load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 0.3}  # fmt: skip


def test_sigterm_where_only_the_best_would_stay(tmp_path: Path) -> None:
    """At the end of training the Trainer removes all but the best one; not what a resume needs."""
    runs.run(
        tmp_path,
        "told",
        deepspeed=False,
        steps=9,
        arguments=BEST,
        sigterm_at=[5, 0],
        options=("--save-on-sigterm",),
    )
    assert "checkpoint-5" in runs.checkpoints(tmp_path / "out")


@pytest.mark.parametrize("deepspeed", [False, pytest.param(True, marks=pytest.mark.huggingface)])
def test_just_in_time_checkpoints(tmp_path: Path, deepspeed: bool) -> None:
    """``enable_jit_checkpoint``: at the end of the step, on all ranks, exact."""
    case = {
        "deepspeed": deepspeed,
        "steps": 6,
        "arguments": {"save_steps": 100, "enable_jit_checkpoint": True},
    }
    whole, _ = runs.run(tmp_path, "whole", 2, **case, out=str(tmp_path / "whole"))
    runs.run(tmp_path, "told", 2, **case, sigterm_at=[3, 1])
    assert runs.checkpoints(tmp_path / "out") == ["checkpoint-3"]
    resumed, _ = runs.run(tmp_path, "resumed", 2, **case, seed=2, resume=True)
    assert resumed["logs"] == whole["logs"]


def test_a_rank_that_cannot_write(tmp_path: Path) -> None:
    """All ranks raise, at once, though the Trainer has a barrier of its own where it looks for the best model."""
    start = time.monotonic()
    _, log = runs.run(
        tmp_path, "full", 2, deepspeed=False, steps=6, arguments=BEST, fail_in_save_at=[4, 0], codes=[1, 1]
    )
    assert time.monotonic() - start < 120
    assert "rank 0: checkpoint-4 could not be written: [Errno 28] No space left on device" in log
    assert log.count("nvme_resume.errors.NoSpaceError: [rank 0") == 2
    assert runs.checkpoints(tmp_path / "out") == ["checkpoint-2"]


def test_files_that_were_put_there_before_come_along(tmp_path: Path) -> None:
    runs.run(tmp_path, "put", deepspeed=False, steps=4, arguments={"save_steps": 2}, put_before_save=True)
    out = tmp_path / "out"
    for step in (2, 4):
        assert (out / f"checkpoint-{step}" / "more" / "projector.bin").read_text() == str(step)
        complete(out / f"checkpoint-{step}", 1)


@pytest.mark.parametrize("limit", [1, 2])
def test_the_best_model_stays(tmp_path: Path, limit: int) -> None:
    """Its path is a final one, at the end and in every ``trainer_state.json``."""
    arguments = {**BEST, "save_total_limit": limit}
    report, _ = runs.run(tmp_path, "best", 2, deepspeed=False, steps=8, arguments=arguments)
    out = tmp_path / "out"
    losses = {f"checkpoint-{e['step']}": e["eval_loss"] for e in report["logs"] if "eval_loss" in e}
    best = min(losses, key=lambda name: losses[name])
    assert report["best"] == str(out / best)
    there = runs.checkpoints(out)
    assert best in there and (limit == 1 or "checkpoint-8" in there) and len(there) == limit
    for name in there:
        complete(out / name, 2)
        named = json.loads((out / name / "trainer_state.json").read_text())["best_model_checkpoint"]
        assert Path(named).parent == out and named in [str(out / n) for n in losses]


def test_going_back_past_a_later_checkpoint(tmp_path: Path) -> None:
    """Case C3: the step-6 checkpoint that is there is replaced when its step comes again."""
    out = tmp_path / "out"
    case = {"steps": 6, "arguments": {"save_steps": 2}}
    whole, _ = runs.run(tmp_path, "whole", **case)
    before = (out / "checkpoint-6").stat().st_ino
    resumed, _ = runs.run(tmp_path, "back", **case, seed=2, resume=str(out / "checkpoint-2"))
    assert resumed["logs"] == whole["logs"]
    assert runs.checkpoints(out) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert (out / "checkpoint-6").stat().st_ino != before


def test_two_jobs_with_one_output_folder(tmp_path: Path) -> None:
    from nvme_resume.storage import locks

    out = tmp_path / "out"
    out.mkdir()
    with_it = locks.take_save_folder(out, hint="")
    try:
        _, log = runs.run(
            tmp_path, "second", deepspeed=False, steps=2, arguments={"save_steps": 2}, codes=[1]
        )
    finally:
        with_it.close()
    assert f"process {os.getpid()} on " in log
    assert runs.checkpoints(out) == []
