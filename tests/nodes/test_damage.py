"""What lies on a node is damaged: a good copy takes its place, or the step before is loaded, or one error says so."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nvme_resume import layout
from nvme_resume.storage import audit
from tests import harness
from tests.nodes import cases
from tests.storage.test_commands import nvme_resume

OPTIONS = {"replicas": 1, "timeout_seconds": 20}
matrix = pytest.mark.matrix


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, harness.Run]:
    """Two nodes that each hold both parts of steps 1 and 2."""
    tmp = tmp_path_factory.mktemp("base")
    saves = [{**cases.SAVE, "at": at} for at in (1, 2)]
    return tmp, cases.saved(tmp, 2, OPTIONS, saves=saves)


@pytest.fixture
def nodes(tmp_path: Path, base: tuple[Path, harness.Run]) -> Path:
    shutil.copytree(base[0] / "nodes", tmp_path / "nodes")
    return tmp_path


def tag_folder(tmp: Path, node: int, step: int = 2) -> Path:
    return cases.folder(tmp, node) / f"global_step{step}"


def record(tmp: Path, node: int, name: str = layout.MANIFEST) -> Path:
    return tag_folder(tmp, node) / layout.RECORDS / name


def a_file(tmp: Path, node: int, rank: int) -> Path:
    """One that a load reads before it touches anything."""
    return sorted(tag_folder(tmp, node).rglob(f"rank{rank:02d}/*.swp"))[1]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


def no_manifest(tmp: Path) -> None:
    record(tmp, 1).unlink()


def damaged_manifest(tmp: Path) -> None:
    flip(record(tmp, 1))


def manifest_and_a_part_elsewhere(tmp: Path) -> None:
    """Each node has a good copy of what is bad on the other one, but for the manifest."""
    damaged_manifest(tmp)
    flip(a_file(tmp, 0, 0))


def manifest_of_the_only_one_with_its_part(tmp: Path) -> None:
    damaged_manifest(tmp)
    record(tmp, 0, "rank01.json").unlink()
    a_file(tmp, 0, 1).unlink()


def no_content(tmp: Path) -> None:
    shutil.rmtree(tag_folder(tmp, 1))
    tag_folder(tmp, 1).mkdir()


def half_of_the_files(tmp: Path) -> None:
    """A copy by other means that was cut; what comes last alphabetically is missing, the manifest too."""
    files = sorted(p for p in tag_folder(tmp, 1).rglob("*") if p.is_file())
    for path in [*files[len(files) // 2 :], record(tmp, 1)]:
        path.unlink(missing_ok=True)


def damaged_record(tmp: Path) -> None:
    record(tmp, 1, "rank01.json").write_text("x")


def damaged_seal(tmp: Path) -> None:
    flip(record(tmp, 1, "rank01.seal.json"))


def damaged_file(tmp: Path) -> None:
    flip(a_file(tmp, 1, 1))


def damaged_model_file(tmp: Path) -> None:
    flip(next(tag_folder(tmp, 1).glob("*_rank_1_*model_states.pt")))


@pytest.mark.parametrize(
    ("damage", "tag"),
    [
        (no_manifest, None),
        pytest.param(damaged_manifest, None, marks=matrix),
        (manifest_and_a_part_elsewhere, cases.TAG),
        (manifest_of_the_only_one_with_its_part, None),
        pytest.param(no_content, None, marks=matrix),
        pytest.param(half_of_the_files, cases.TAG, marks=matrix),
        (damaged_record, None),
        pytest.param(damaged_seal, None, marks=matrix),
        (damaged_file, None),
        pytest.param(damaged_file, cases.TAG, marks=matrix),
        pytest.param(damaged_model_file, cases.TAG, marks=matrix),
    ],
)
def test_a_good_copy_takes_the_place_of_a_damaged_one(
    nodes: Path, base: tuple[Path, harness.Run], damage: Callable[[Path], None], tag: str | None
) -> None:
    damage(nodes)
    whole_before = [cases.records_in(cases.folder(nodes, node)) for node in (0, 1)]
    notes = tag_folder(nodes, 1) / "notes.txt"
    if damage is not no_content:
        notes.write_text("somebody's")
    options = {**OPTIONS, "verify": "full"}
    cases.assert_resumes(nodes, base[1], options, {"dir": "ck", "tag": tag})
    # Nothing that was there is gone.
    assert notes.is_file() or damage is no_content
    for node, before in enumerate(whole_before):
        assert {node, *before} <= set(cases.records_in(cases.folder(nodes, node)))
    # Once and for all: nothing has to come again.
    cases.assert_resumes(nodes, base[1], options, {"dir": "ck", "tag": tag})
    assert " gets the files of ranks" not in (nodes / "log-resumed.0.txt").read_text()


def test_the_only_copy_is_damaged(nodes: Path, base: tuple[Path, harness.Run]) -> None:
    """The step before is loaded; who names the tag hears which file of which node it is."""
    flip(a_file(nodes, 0, 1))
    shutil.rmtree(tag_folder(nodes, 1))
    case = {**cases.CASE, **cases.nodes(nodes), "nvme_checkpoint": OPTIONS}
    failing = [{"dir": "ck", "tag": cases.TAG}]
    found = harness.run(nodes, "resumed", 2, **case, seed=2, failing_loads=failing, load="ck")
    for rank, whole in zip(found.ranks, base[1].ranks, strict=True):
        assert rank["start"] == 1 and rank["losses"] == whole["losses"][1:]
        (failure,) = rank["failures"]
        assert failure["untouched"] and failure["type"] == "NoCheckpointError", failure
        assert "files of ranks [1]" in failure["text"] and a_file(nodes, 0, 1).name in failure["text"]


def test_a_manifest_that_cannot_be_given_back(nodes: Path, base: tuple[Path, harness.Run]) -> None:
    """Something is in its way: then that checkpoint is none on the node, and the step before is loaded."""
    record(nodes, 1).unlink()
    record(nodes, 1).mkdir()
    (record(nodes, 1) / "something").write_text("")
    case = {**cases.CASE, **cases.nodes(nodes), "nvme_checkpoint": OPTIONS}
    found = harness.run(nodes, "resumed", 2, **case, seed=2, load="ck")
    assert [r["losses"] for r in found.ranks] == [r["losses"][1:] for r in base[1].ranks]
    assert "cannot be given back" in (nodes / "log-resumed.1.txt").read_text()


@matrix
def test_one_of_two_copies_is_damaged(tmp_path: Path) -> None:
    whole = cases.saved(tmp_path, 3, {**OPTIONS, "replicas": 2})
    cases.replace_disk(tmp_path, 1)
    flip(a_file(tmp_path, 0, 1))  # the first that is asked
    cases.assert_resumes(tmp_path, whole, OPTIONS)
    assert cases.ranks_in(cases.folder(tmp_path, 1)) == [1]
    audit.check(cases.folder(tmp_path, 2) / cases.TAG, "full")


@pytest.mark.parametrize(
    "whose", ["another run's", "somebody's", pytest.param("plain DeepSpeed's", marks=matrix)]
)
def test_what_is_not_ours_is_left_alone(nodes: Path, base: tuple[Path, harness.Run], whose: str) -> None:
    """The tag means something else on node 1, where the manifest is not there to say so."""
    if whose == "another run's":
        again = nodes / "again"
        again.mkdir()
        cases.saved(again, 2, True)
        shutil.rmtree(tag_folder(nodes, 1))
        shutil.copytree(tag_folder(again, 1), tag_folder(nodes, 1))
        record(nodes, 1).unlink()
    elif whose == "somebody's":
        shutil.rmtree(tag_folder(nodes, 1))
        tag_folder(nodes, 1).mkdir()
        (tag_folder(nodes, 1) / "precious.txt").write_text("")
        code, _, said = nvme_resume(
            "gather", cases.folder(nodes, 0), "--to", cases.folder(nodes, 1), "--tag", cases.TAG
        )
        assert code == 10 and "no record of it" in said, said
    else:
        shutil.rmtree(tag_folder(nodes, 1) / layout.RECORDS)
    there = sorted(p.name for p in tag_folder(nodes, 1).rglob("*"))
    case = {**cases.CASE, **cases.nodes(nodes), "nvme_checkpoint": OPTIONS}
    failing = [{"dir": "ck", "tag": cases.TAG}] if whose != "plain DeepSpeed's" else []
    found = harness.run(nodes, "resumed", 2, **case, seed=2, failing_loads=failing, load="ck")
    for rank, whole in zip(found.ranks, base[1].ranks, strict=True):
        assert rank["start"] == 1 and rank["losses"] == whole["losses"][1:]
        for failure in rank["failures"]:
            assert failure["untouched"] and failure["type"] == "NoCheckpointError", failure
            assert "another checkpoint" in failure["text"] and "another run" in failure["text"]
            assert "[rank 1, " in failure["text"], failure
    assert sorted(p.name for p in tag_folder(nodes, 1).rglob("*")) == there


def test_gather_by_hand_takes_what_is_good(nodes: Path) -> None:
    """And what it says is there can be verified."""
    one, two = (cases.folder(nodes, n) for n in (0, 1))
    target = nodes / "all"
    flip(a_file(nodes, 0, 1))
    (one / "global_step1" / layout.RECORDS / layout.MANIFEST).write_text("{")  # a tag that nobody asks for
    code, _, said = nvme_resume("gather", one, two, "--to", target)
    assert code == 0 and "the part of rank 1 came from" in said and str(two) in said, said
    assert nvme_resume("verify", target / cases.TAG, "--level", "full")[0] == 0

    for name in ("rank01.json", "rank00.seal.json", layout.MANIFEST):  # damaged where it was gathered to
        (target / cases.TAG / layout.RECORDS / name).write_text("x")
        code, _, said = nvme_resume("gather", one, two, "--to", target)
        assert code == 0, said
        assert nvme_resume("verify", target / cases.TAG, "--level", "full")[0] == 0, name

    flip(next((target / cases.TAG).rglob("rank00/*.swp")))
    code, _, said = nvme_resume("gather", one, two, "--to", target)
    assert code == 0 and "nothing to copy" not in said, said
    assert nvme_resume("verify", target / cases.TAG, "--level", "full")[0] == 0

    # What has no hashes cannot be told from what was damaged: the copy that has them comes first.
    for path in (tag_folder(nodes, 0) / layout.RECORDS).glob("*.seal.json"):
        path.unlink()
    flip(a_file(nodes, 0, 0))
    shutil.rmtree(target)
    code, _, said = nvme_resume("gather", one, two, "--to", target)
    assert code == 0, said
    good = a_file(nodes, 1, 0)
    assert (target / good.relative_to(two)).read_bytes() == good.read_bytes()

    # A manifest that is damaged in one folder does not hide its parts.
    record(nodes, 1).write_text("{")
    code, _, said = nvme_resume("gather", one, two, "--to", nodes / "all2")
    assert code == 0 and nvme_resume("verify", nodes / "all2" / cases.TAG, "--level", "full")[0] == 0, said
    code, _, said = nvme_resume("gather", one, "--to", two, "--tag", cases.TAG)  # and is mended where they go
    assert code == 0 and nvme_resume("verify", two / cases.TAG, "--level", "full")[0] == 0, said

    flip(a_file(nodes, 1, 1))  # now nobody has it
    code, _, said = nvme_resume("gather", one, two, "--to", nodes / "none", "--tag", cases.TAG)
    assert code == 12 and a_file(nodes, 1, 1).name in said
    assert [p.name for p in (nodes / "none").iterdir() if "global_step" in p.name] == []


def test_gather_by_hand_refuses_what_cannot_be_meant(nodes: Path) -> None:
    one, two = (cases.folder(nodes, n) for n in (0, 1))
    code, _, said = nvme_resume(
        "gather", one, two, "--to", nodes / "all", "--tag", f"../{two.name}/{cases.TAG}"
    )
    assert code == 2 and "not a usable tag" in said
    taken = nodes / "taken" / cases.TAG
    taken.parent.mkdir()
    taken.write_text("mine")
    code, _, said = nvme_resume("gather", one, two, "--to", taken.parent)
    assert code == 10 and "another checkpoint" in said and taken.read_text() == "mine", said
    taken.unlink()
    taken.mkdir()
    (taken / "link").symlink_to(one)
    code, _, said = nvme_resume("gather", one, two, "--to", taken.parent)
    assert code == 10 and "another checkpoint" in said and (taken / "link").is_symlink(), said
    (nodes / "file").write_text("")
    code, _, said = nvme_resume("gather", one, two, "--to", nodes / "file")
    assert code == 2 and "--to is no folder" in said
    for path in (one, two):
        record(nodes, int(path.parent.name[-1])).write_text("{")
    code, _, said = nvme_resume("gather", one, two, "--to", nodes / "all", "--tag", cases.TAG)
    assert code == 12 and "every node has the same manifest" in said, said
