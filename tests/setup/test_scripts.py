"""The set-up script where it may not install system packages."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests import harness


def test_missing_system_packages_are_named_with_the_command(tmp_path: Path) -> None:
    for program in ("bash", "dirname", "realpath"):
        found = shutil.which(program)
        assert found is not None
        (tmp_path / program).symlink_to(found)
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    venv = tmp_path / "venv"
    done = subprocess.run(
        [harness.ROOT / "scripts" / "setup"],
        env={**os.environ, "PATH": str(tmp_path), "NVME_RESUME_VENV": str(venv)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "sudo apt-get install python3-venv python3-dev g++" in done.stderr
    assert not venv.exists()
