"""Files and folders of a checkpoint get the modes that the umask allows, no more and no less."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvme_resume import layout
from tests import harness

SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")  # DeepSpeed's, and executable


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize(
    ("umask", "method"), [(0o077, "link"), (0o022, "direct")], indirect=["umask"], ids=["077", "022"]
)
def test_modes_follow_the_umask(tmp_path: Path, umask: int, method: str) -> None:
    folder = tmp_path / "ck"
    save = {"at": 1, "dir": str(folder), "wait": True}
    case = {"layers": 2, "until": 1, "nvme_checkpoint": {"method": method}}
    harness.run(tmp_path, "first", saves=[save, save], **case)  # the second one replaces the first
    found = {p: p.lstat().st_mode for p in [folder, *folder.rglob("*")] if p.name not in SCRIPTS}
    names = {p.name for p in found}
    assert {layout.LATEST, "rank00.json", "rank00.seal.json", "rank00.extras.safetensors"} <= names
    assert any(n.endswith(".tensor.swp") for n in names) and any(n.endswith("optim_states.pt") for n in names)
    for path, mode in found.items():
        allowed = (0o777 if stat.S_ISDIR(mode) else 0o666) & ~umask
        assert stat.S_IMODE(mode) == allowed, (str(path), oct(mode))
