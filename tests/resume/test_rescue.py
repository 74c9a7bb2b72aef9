"""Checkpoints of plain DeepSpeed: old layouts, left-overs, and plain DeepSpeed reading ours."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests import harness

TAG = "global_step3"


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain DeepSpeed checkpoint of one rank, fp32, saved after three of six steps."""
    tmp = tmp_path_factory.mktemp("stock")
    case = {"mode": "stock", "dtype": "fp32"}
    first = harness.run(tmp, "first", until=6, saves=[{"at": 3, "dir": str(tmp / "ck")}], **case)
    (tmp / "losses").write_text("\n".join(first.ranks[0]["losses"]))
    return tmp


def resumed(tmp: Path, folder: Path, *, check: bool = True) -> harness.Run:
    # Random states were never saved by plain DeepSpeed: take dropout out of the comparison.
    return harness.run(tmp, "resumed", seed=9, dtype="fp32", until=3, load=str(folder), check=check)


def masters(tmp: Path, stock: Path) -> dict[str, str]:
    """Digests after loading the untouched checkpoint."""
    run = resumed(tmp, stock / "ck")
    found: dict[str, str] = {k: v for k, v in run.ranks[0]["loaded"].items() if k != "rng"}
    return found


def test_flat_layout_and_left_over_files(tmp_path: Path, stock: Path) -> None:
    """0.13 to 0.17 wrote one flat folder; an older complete set with shifted ids lies beside the live one."""
    expected = masters(tmp_path, stock)
    flat = tmp_path / "flat"
    shutil.copytree(stock / "ck", flat)
    base = flat / TAG / "offloaded_tensors"
    for path in list((base / "rank00").iterdir()):
        path.rename(base / path.name)
    (base / "rank00").rmdir()
    for path in list(base.iterdir()):
        key, _, ids = path.name.removesuffix(".tensor.swp").rpartition("-")
        first, last = (int(i) + 100 for i in ids.split("_"))
        stale = base / f"{key + '-' if key else ''}{first}_{last}.tensor.swp"
        stale.write_bytes(b"\1" * path.stat().st_size)
        os.utime(stale, (1, 1))
    run = resumed(tmp_path, flat)
    assert (
        harness.differences(expected, {k: v for k, v in run.ranks[0]["loaded"].items() if k != "rng"}) == []
    )


def test_a_missing_swap_file_is_refused(tmp_path: Path, stock: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(stock / "ck", broken)
    path = next((broken / TAG / "offloaded_tensors" / "rank00").glob("exp_avg_sq-*"))
    path.unlink()
    run = resumed(tmp_path, broken, check=False)
    assert [e["type"] for e in run.errors] == ["CorruptError"], run.log
    assert path.name in run.errors[0]["text"]


def test_flat_layout_of_several_ranks_is_refused(tmp_path: Path) -> None:
    case = {"layers": 3, "sub_group_size": 300_000}
    harness.run(
        tmp_path, "first", 2, mode="stock", until=2, saves=[{"at": 2, "dir": str(tmp_path / "ck")}], **case
    )
    base = tmp_path / "ck" / "global_step2" / "offloaded_tensors"
    for rank in ("rank00", "rank01"):
        for path in list((base / rank).iterdir()):
            path.rename(base / path.name)
        (base / rank).rmdir()
    run = harness.run(tmp_path, "resumed", 2, seed=9, check=False, load=str(tmp_path / "ck"), **case)
    assert [e["type"] for e in run.errors] == ["IncompatibleError"] * 2, run.log
    assert "overwrote each other" in run.errors[0]["text"]


def test_plain_deepspeed_reads_our_checkpoints(tmp_path: Path) -> None:
    """It still loses what it loses, but it finds its files."""
    harness.run(tmp_path, "first", until=2, saves=[{"at": 2, "dir": str(tmp_path / "ck")}])
    run = harness.run(tmp_path, "resumed", mode="stock", seed=9, until=3, load=str(tmp_path / "ck"))
    assert run.ranks[0]["start"] == 2
