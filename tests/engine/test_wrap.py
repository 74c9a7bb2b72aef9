"""What wrapping changes and what it leaves alone; each check in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import harness

PRELUDE = """
import inspect, json, os, sys
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
import deepspeed, torch
from deepspeed.runtime.engine import DeepSpeedEngine
from tests import harness, training
import nvme_resume
from nvme_resume import NvmeResumeEngine
case = {**harness.DEFAULTS, "nvme_path": sys.argv[1], "layers": 1}
def build(**changes):
    settings = {**case, **changes}
    config = training.ds_config(settings)
    if settings["nvme_checkpoint"] is None:
        del config["nvme_checkpoint"]
    model = training.build_model(settings)
    return deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]
"""


def script(tmp_path: Path, body: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + body, str(tmp_path), str(harness.free_port())],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=harness.ROOT,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(harness.ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_engine_stays_the_same_engine(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
engine = build()
before = {n: inspect.signature(getattr(engine, n)) for n in ("save_checkpoint", "load_checkpoint")}
base = type(engine)
wrapped = NvmeResumeEngine.wrap(engine)
assert wrapped is engine and isinstance(engine, DeepSpeedEngine) and isinstance(engine, base)
assert isinstance(engine, NvmeResumeEngine)
kind = type(engine)
assert NvmeResumeEngine.wrap(engine) is engine and type(engine) is kind
for name, signature in before.items():
    assert list(inspect.signature(getattr(engine, name)).parameters) == list(signature.parameters), name
assert "exclude_frozen_parameters" in inspect.signature(engine.save_checkpoint).parameters
assert type(build(nvme_checkpoint=False)) is base
off = build(nvme_checkpoint=False)
assert NvmeResumeEngine.wrap(off) is off and type(off) is base
""",
    )


def test_install_wraps_only_where_asked(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
original = deepspeed.initialize
plain = build(nvme_checkpoint=None)
assert type(plain) is DeepSpeedEngine
nvme_resume.install(); nvme_resume.install()
assert isinstance(build(nvme_checkpoint=True), NvmeResumeEngine)
assert type(build(nvme_checkpoint=None)) is DeepSpeedEngine
assert type(build(nvme_checkpoint=False)) is DeepSpeedEngine
assert type(plain) is DeepSpeedEngine
from nvme_resume.installer import uninstall
uninstall()
assert deepspeed.initialize is original
""",
    )


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"nvme_checkpoint": {"colour": 1}}, "ConfigError", "nvme_checkpoint.colour"),
        ({"nvme_checkpoint": 3}, "ConfigError", "true, false"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, changes: object, kind: str, text: str) -> None:
    script(
        tmp_path,
        f"""
try:
    NvmeResumeEngine.wrap(build(**{changes!r}))
except nvme_resume.NvmeResumeError as error:
    assert type(error).__name__ == {kind!r} and {text!r} in str(error), error
else:
    raise SystemExit("no error")
""",
    )
