"""Nothing changes before somebody asks, and everything can be taken back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import sys
import transformers.trainer as t
import transformers.trainer_utils as u
import accelerate.state as s

def state():
    return [vars(t.Trainer)["_save_checkpoint"], vars(t.TrainingArguments)["should_save"], t.get_last_checkpoint,
            u.get_last_checkpoint, t.shutil, t.DEFAULT_CALLBACKS, vars(s.PartialState)["wait_for_everyone"]]

before = state()
import nvme_resume, nvme_resume.engine, nvme_resume.installer, nvme_resume.huggingface.patches as patches
assert all(a is b for a, b in zip(before, state())), "patched by an import"
nvme_resume.install()
nvme_resume.install()
changed = [a is not b for a, b in zip(before, state())]
assert changed == [True] * 5 + [False] * 2, changed  # 5.24 does not wait there
patches.uninstall()
assert all(a is b for a, b in zip(before, state())), "not taken back"
nvme_resume.install()
nvme_resume.install(save_on_sigterm=True)
nvme_resume.install(save_on_sigterm=True)
assert len(t.DEFAULT_CALLBACKS) == len(before[5]) + 1
print("fine")
"""

LATER = """
import sys
import nvme_resume
nvme_resume.install()
assert "transformers.trainer" not in sys.modules
from transformers import Trainer
assert hasattr(vars(Trainer)["_save_checkpoint"], "__wrapped__")
print("fine")
"""

UNKNOWN = """
import importlib.metadata
real = importlib.metadata.version
importlib.metadata.version = lambda name: "99.0" if name == "transformers" else real(name)
import nvme_resume
nvme_resume.install()
import transformers.trainer
nvme_resume.install()
print("fine")
"""


UPLOADS = """
import transformers.trainer as t
import huggingface_hub
seen = []

class Api:
    token = "t"
    def upload_folder(self, **kwargs):
        seen.append(kwargs["ignore_patterns"])

t.hf_api = Api
import nvme_resume
nvme_resume.install()
assert t.hf_api().token == "t"
t.hf_api().upload_folder(ignore_patterns=["_*"])
t.hf_api().upload_folder()
from huggingface_hub.utils import filter_repo_objects
files = ["a.bin", ".tmp-checkpoint-4.x/checkpoint-4/o.pt", ".nvme_resume.lock", ".nvme_resume.owner", ".old-c.1/x",
         "last-checkpoint/global_step2/.nvme_resume.owner", "last-checkpoint/latest"]
left = list(filter_repo_objects(files, ignore_patterns=seen[0]))
assert left == ["a.bin", "last-checkpoint/latest"], left
assert "_*" in seen[0] and "_*" not in seen[1]
print("fine")
"""


def test_uploads_leave_out_what_is_ours() -> None:
    python(UPLOADS)


def test_errors_of_the_program_are_shown(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise EOFError('Ran out of input')")
    command = [sys.executable, "-m", "nvme_resume.run"]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "EOFError: Ran out of input" in done.stderr
    done = subprocess.run([*command, str(script) + "x"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "there is no file" in done.stderr


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fine" in done.stdout
    return done.stderr


def test_an_import_patches_nothing_and_install_can_be_undone() -> None:
    python(CODE)


def test_install_before_transformers_is_imported() -> None:
    python(LATER)


def test_an_unknown_version_is_named_once() -> None:
    assert python(UNKNOWN).count("transformers 99.0 is not one nvme_resume was tested with") == 1
