"""A checkpoint that looks complete and is damaged: skipped where nobody named it, refused where somebody did."""

from __future__ import annotations

from pathlib import Path

from tests import harness


def test_damage_found_while_loading(tmp_path: Path) -> None:
    checkpoint = tmp_path / "ck"
    saves = [{"at": at, "dir": str(checkpoint)} for at in (1, 2)]
    harness.run(tmp_path, "first", until=2, saves=saves)
    tag = checkpoint / "global_step2"
    master = next((tag / "offloaded_tensors" / "rank00").glob("[0-9]*.swp"))
    with master.open("r+b") as file:
        file.seek(4099)
        file.write(b"\x55")
    run = harness.run(tmp_path, "resumed", seed=9, until=1, load=str(checkpoint))
    assert Path(run.ranks[0]["load_path"]).parent == checkpoint / "global_step1"
    (line,) = [line for line in run.log.splitlines() if "skipped:" in line]
    assert "loading global_step1" in line and "global_step2" in line and master.name in line
    named = {"dir": str(checkpoint), "tag": "global_step2"}
    run = harness.run(tmp_path, "named", seed=9, failing_loads=[named])
    assert run.ranks[0]["failures"][0]["type"] == "CorruptError" and run.ranks[0]["failures"][0]["untouched"]
