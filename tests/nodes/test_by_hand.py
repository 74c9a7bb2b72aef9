"""The parts of nodes with disks of their own become one checkpoint that resumes on one machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from nvme_resume import layout
from nvme_resume.storage import records, upload
from nvme_resume.storage.remote import Remote
from tests import harness
from tests.nodes import cases
from tests.storage.test_commands import nvme_resume


def test_gathered_parts_resume_exactly(tmp_path: Path) -> None:
    case = {"layers": 1, "until": 4}
    nodes = {"nodes": True, "node_local": True, "private": str(tmp_path / "nodes")}
    save = {"at": 2, "dir": "ck", "wait": True}
    whole = harness.run(tmp_path, "whole", 2, **case, **nodes, saves=[save])
    parts = [tmp_path / "nodes" / f"node{rank}" / "ck" for rank in (0, 1)]
    everything = tmp_path / "everything"

    code, _, said = nvme_resume("gather", parts[0], tmp_path / "nowhere", "--to", everything)
    assert code == 10 and "no such folder" in said and str(tmp_path / "nowhere") in said
    code, _, said = nvme_resume("gather", *parts, "--to", parts[0] / "inside")
    assert code == 2 and "inside a folder that is gathered" in said and not (parts[0] / "inside").exists()
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


def test_one_part_in_a_folder_and_one_under_a_url(tmp_path: Path) -> None:
    """And what was cut short is gone on with: whole files stay, of a file that came in part its good chunks."""
    whole = cases.saved(tmp_path, 2, True)
    parts = [cases.folder(tmp_path, node) for node in (0, 1)]
    url = (tmp_path / "bucket").as_uri()
    saved = records.read_manifest(parts[1] / cases.TAG).checkpoint_id
    part = upload.Part(parts[1], cases.TAG, saved, (1,), publishes=False, latest=False)
    upload.upload(part, Remote(url), 10)
    shutil.copytree(
        parts[1] / cases.TAG / "nvme_resume",
        tmp_path / "bucket" / cases.TAG / "nvme_resume",
        ignore=lambda _, names: [n for n in names if n != "manifest.json"],
        dirs_exist_ok=True,
    )
    everything = tmp_path / "everything"
    head = records.read_manifest(parts[0] / cases.TAG)
    staging = everything / layout.staging(cases.TAG, head.checkpoint_id)
    swapped = [p.relative_to(parts[0] / cases.TAG) for p in (parts[0] / cases.TAG).rglob("*.swp")]
    (staging / swapped[0]).parent.mkdir(parents=True)
    shutil.copy2(parts[0] / cases.TAG / swapped[0], staging / swapped[0])
    for index, name in enumerate(swapped[1:3]):  # one that is damaged, and one that is not whole
        content = bytearray((parts[0] / cases.TAG / name).read_bytes())
        content[100] ^= index
        (staging / name).with_name(f".tmp-{name.name}").write_bytes(content[:-1])

    code, text, said = nvme_resume("gather", parts[0], url, "--to", everything, "--json")
    assert code == 0, said
    assert nvme_resume("verify", everything / cases.TAG, "--level", "full")[0] == 0
    data = [p for part in parts for p in (part / cases.TAG).rglob("*") if p.suffix != ".json" and p.is_file()]
    sizes = sum(p.stat().st_size for p in data) - (parts[0] / cases.TAG / swapped[0]).stat().st_size
    assert 0 < json.loads(text)["bytes"] <= sizes
    code, text, _ = nvme_resume("gather", parts[0], url, "--to", everything, "--json")
    assert code == 0 and json.loads(text)["bytes"] == 0
    resumed = harness.run(tmp_path, "resumed", 2, **cases.CASE, seed=2, load=str(everything))
    assert [r["losses"] for r in resumed.ranks] == [r["losses"][2:] for r in whole.ranks]


def test_plain_deepspeed_folders_are_named_by_global_rank(tmp_path: Path) -> None:
    """Two nodes that both wrote ``rank00``."""
    case = {**cases.CASE, "dropout": 0.0}  # DeepSpeed saves no random states
    whole = cases.saved(tmp_path, 2, True, mode="stock", dropout=0.0, saves=[{"at": 2, "dir": "ck"}])
    parts = [cases.folder(tmp_path, node) for node in (0, 1)]
    assert [[p.name for p in (f / cases.TAG / "offloaded_tensors").iterdir()] for f in parts] == [
        ["rank00"]
    ] * 2
    everything = tmp_path / "everything"
    code, _, said = nvme_resume("gather", parts[1], "--to", everything)
    assert code == 10 and "ranks [0]" in said and not (everything / cases.TAG).exists()
    code, text, said = nvme_resume("gather", *parts, "--to", everything)
    assert code == 0 and "2 ranks" in text, said
    code, text, _ = nvme_resume("gather", *parts, "--to", everything, "--json")
    assert code == 0 and json.loads(text)["bytes"] == 0
    resumed = harness.run(tmp_path, "resumed", 2, **case, seed=2, load=str(everything))
    assert [r["losses"] for r in resumed.ranks] == [r["losses"][2:] for r in whole.ranks]

    # Another run's checkpoint has the same tag and the same sizes: not this one.
    file = next(p for p in (everything / cases.TAG).rglob("*.swp") if "rank01" in str(p))
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    code, text, said = nvme_resume("gather", *parts, "--to", everything)
    assert code == 2 and file.name in said, text + said

    (parts[1] / cases.TAG / "offloaded_tensors" / "rank00").rename(
        parts[1] / cases.TAG / "offloaded_tensors" / "rank07"
    )
    code, _, said = nvme_resume("gather", *parts, "--to", tmp_path / "other")
    assert code == 2 and "rank07" in said


def test_a_trainers_folders_keep_its_files(tmp_path: Path) -> None:
    cases.saved(tmp_path, 2, True)
    parts = [cases.folder(tmp_path, node) for node in (0, 1)]
    for node, folder in enumerate(parts):
        (folder / "trainer_state.json").write_text("{}")
        (folder / f"rng_state_{node}.pth").write_bytes(bytes([node]))
        (folder / "adapter").mkdir()
        (folder / "adapter" / f"part{node}.bin").write_bytes(bytes([node]))
    everything = tmp_path / "checkpoint-2"
    assert nvme_resume("gather", *parts, "--to", everything)[0] == 0
    names = {p.relative_to(everything).as_posix() for p in everything.rglob("*.[bp]*") if p.is_file()}
    assert {"rng_state_0.pth", "rng_state_1.pth", "adapter/part0.bin", "adapter/part1.bin"} <= names
    assert (everything / "trainer_state.json").exists() and (everything / "latest").read_text() == cases.TAG
