"""``nvme-resume doctor`` in a real process."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from nvme_resume.storage import locks
from tests.harness import ROOT
from tests.storage.test_commands import nvme_resume


@pytest.fixture
def config(tmp_path: Path) -> Path:
    content = json.loads((ROOT / "configs" / "zero3_nvme_small.json").read_text())
    content["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(tmp_path / "nvme")
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    return path


def findings(*arguments: str | Path) -> tuple[int, list[dict[str, Any]]]:
    code, text, said = nvme_resume("doctor", "--json", *arguments)
    assert text, said
    return code, json.loads(text)["findings"]


def test_a_machine_that_is_fine(tmp_path: Path, config: Path) -> None:
    (tmp_path / "nvme").mkdir()
    save_dir = tmp_path / "ck"
    save_dir.mkdir()
    code, found = findings("--config", config, "--save-dir", save_dir)
    assert code == 0, found
    text = json.dumps(found)
    for word in ("deepspeed", "torch", "copier", "libaio", "nvme_path", "save folder", "O_DIRECT", "reflink"):
        assert word in text, (word, text)
    assert not list(save_dir.iterdir())  # it leaves nothing behind
    code, text, _ = nvme_resume("doctor", "--config", config, "--save-dir", save_dir)
    assert code == 0 and "nvme_path" in text and "BAD" not in text


def test_a_stale_build_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = tmp_path / "ops"
    real = os.environ.get("TORCH_EXTENSIONS_DIR")
    if real is not None and Path(real).is_dir():
        shutil.copytree(real, ops, ignore=shutil.ignore_patterns("lock"))
    (ops / "async_io").mkdir(parents=True, exist_ok=True)
    (ops / "async_io" / "lock").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(ops))
    code, found = findings()
    stale = [f for f in found if "lock" in f["value"]]
    assert stale and str(ops) in json.dumps(stale), found
    assert code == (1 if any(f["state"] == "bad" for f in stale) else 0)


def test_a_folder_that_is_owned(tmp_path: Path) -> None:
    with_it = locks.take_save_folder(tmp_path, hint="")
    try:
        _, found = findings("--save-dir", tmp_path)
    finally:
        with_it.close()
    assert f"process {os.getpid()} on" in json.dumps(found)


def test_a_configuration_that_will_not_do(tmp_path: Path, config: Path) -> None:
    content = json.loads(config.read_text())
    content["nvme_checkpoint"] = {"colour": "red"}
    config.write_text(json.dumps(content))
    code, found = findings("--config", config)
    assert code == 1 and "colour" in json.dumps(found)
    del content["nvme_checkpoint"]
    config.write_text(json.dumps(content))
    _, found = findings("--config", config)
    assert "nvme_checkpoint" in json.dumps(found)
    config.write_text("{")
    assert nvme_resume("doctor", "--config", config)[0] == 2
