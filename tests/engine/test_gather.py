"""The parts of nodes with disks of their own become one checkpoint that resumes on one machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests import harness
from tests.storage.test_commands import nvme_resume


def test_gathered_parts_resume_exactly(tmp_path: Path) -> None:
    case = {"layers": 1, "until": 4}
    nodes = {"nodes": True, "node_local": True, "private": str(tmp_path / "nodes")}
    save = {"at": 2, "dir": "ck", "wait": True}
    whole = harness.run(tmp_path, "whole", 2, **case, **nodes, saves=[save])
    parts = [tmp_path / "nodes" / f"node{rank}" / "ck" for rank in (0, 1)]
    everything = tmp_path / "everything"

    code, _, said = nvme_resume("gather", parts[0], "--to", everything)
    assert code == 10 and "ranks [1]" in said
    assert not (everything / "global_step2").exists()

    (tmp_path / "copied").mkdir()
    swapped = next((parts[1] / "global_step2").rglob("*.tensor.swp"))
    damaged = tmp_path / "copied" / "ck"
    shutil.copytree(parts[1], damaged)
    file = damaged / swapped.relative_to(parts[1])
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    code, _, said = nvme_resume("gather", parts[0], damaged, "--to", everything)
    assert code == 12 and swapped.name in said and "rank 1" in said
    assert not [p.name for p in everything.iterdir() if "global_step2" in p.name]

    code, text, said = nvme_resume("gather", *parts, "--to", everything, "--json")
    assert code == 0 and json.loads(text)["bytes"] > 1 << 20, said
    assert nvme_resume("verify", everything / "global_step2", "--level", "full")[0] == 0
    code, text, _ = nvme_resume("gather", *parts, "--to", everything, "--json")
    assert code == 0 and json.loads(text)["bytes"] == 0

    # The master's own folder becomes the whole one: of its part nothing is copied.
    size = sum(p.stat().st_size for p in (parts[1] / "global_step2").rglob("*") if "rank01" in str(p))
    code, text, _ = nvme_resume("gather", *parts, "--to", parts[0], "--json")
    assert code == 0 and 0 < json.loads(text)["bytes"] < 1.6 * size
    assert nvme_resume("last", parts[0])[1] == f"{parts[0] / 'global_step2'}\n"

    resumed = harness.run(tmp_path, "resumed", 2, **case, seed=2, load=str(everything))
    assert [r["losses"] for r in resumed.ranks] == [r["losses"][2:] for r in whole.ranks]
