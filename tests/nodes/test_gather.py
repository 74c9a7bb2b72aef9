"""``"gather": "main"``: the folder of the node with rank 0 resumes the run alone."""

from __future__ import annotations

from pathlib import Path

from tests import harness
from tests.nodes import cases
from tests.storage.test_commands import nvme_resume


def test_the_master_holds_all_parts_and_resumes_alone(tmp_path: Path) -> None:
    whole = cases.saved(tmp_path, 3, {"gather": "main"})
    master = cases.folder(tmp_path, 0)
    heads = {
        (cases.folder(tmp_path, n) / cases.TAG / "nvme_resume/manifest.json").read_bytes() for n in range(3)
    }
    assert len(heads) == 1
    log = (tmp_path / "log-whole.0.txt").read_text()
    assert "holds the files of all ranks" in log, log[-3000:]
    assert nvme_resume("verify", master / cases.TAG, "--level", "full")[0] == 0
    assert [cases.ranks_in(cases.folder(tmp_path, n)) for n in range(3)] == [[0, 1, 2], [1], [2]]

    resumed = harness.run(tmp_path, "alone", 3, **cases.CASE, seed=2, load=str(master))
    assert [r["losses"] for r in resumed.ranks] == [r["losses"][2:] for r in whole.ranks]

    # A node with a new disk gets its own part from the master, and only that.
    cases.replace_disk(tmp_path, 2)
    cases.assert_resumes(tmp_path, whole, {"gather": "main"})
    assert cases.ranks_in(cases.folder(tmp_path, 2)) == [2]
