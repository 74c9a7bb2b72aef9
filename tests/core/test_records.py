"""Records, names, options and errors: what is accepted, what is refused and in which words."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nvme_resume
from nvme_resume import config, errors, layout, manifest
from nvme_resume.errors import ConfigError, CorruptError, IncompatibleError, NvmeResumeError

HEAD = manifest.Manifest(
    checkpoint_id="abc",
    tag="global_step5",
    global_steps=5,
    world_size=1,
    sealed=False,
    created="2026-01-01T00:00:00+00:00",
    versions={"nvme_resume": "0"},
    settings={"zero_stage": 3},
    ranks=(manifest.RankEntry(rank=0, host="h", record="0" * 32, extras="1" * 32),),
)


def test_exported_names() -> None:
    assert nvme_resume.__all__ == [
        "NvmeResumeCallback",
        "NvmeResumeEngine",
        "NvmeResumeError",
        "__version__",
        "install",
        "last_resumable",
    ]


def test_a_record_survives_the_round_trip() -> None:
    data = manifest.encode(HEAD)
    assert manifest.decode(manifest.Manifest, data, "m") == HEAD


@given(st.integers(0, 10**6), st.integers(0, 7))
@settings(max_examples=300, deadline=None)
def test_any_flipped_bit_is_refused_or_harmless(position: int, bit: int) -> None:
    data = bytearray(manifest.encode(HEAD))
    data[position % len(data)] ^= 1 << bit
    try:
        found = manifest.decode(manifest.Manifest, bytes(data), "m")
    except (CorruptError, IncompatibleError):
        return
    assert found == HEAD  # white space between tokens


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"kind": "manifest", "kind": "manifest", "format": 1, "digest": "", "body": {}}',
        b'{"kind": "rank", "format": 1, "digest": "", "body": {}}',
        b'{"kind": "manifest", "format": 0, "digest": "", "body": {}}',
        b'{"kind": "manifest", "format": true, "digest": "x", "body": {}}',
        b'{"kind": "manifest", "format": 1, "digest": "x", "body": {}}',
    ],
)
def test_hostile_records_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptError):
        manifest.decode(manifest.Manifest, data, "m")


def test_a_newer_format_is_not_called_corrupt() -> None:
    envelope = json.loads(manifest.encode(HEAD))
    envelope["format"] = manifest.FORMAT + 1
    with pytest.raises(IncompatibleError, match="newer"):
        manifest.decode(manifest.Manifest, json.dumps(envelope).encode(), "m")


@pytest.mark.parametrize("size", [-1, 1 << 63])
def test_sizes_out_of_range_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="size"):
        manifest.FileSeal(size=size, digest="0" * 32, chunks="")


@pytest.mark.parametrize("relative", ["/etc/passwd", "../x", "a/../../x", "", "a\0b"])
def test_no_path_leaves_the_folder(relative: str) -> None:
    assert layout.inside(Path("/ck"), relative) is None


def test_names_of_swap_files() -> None:
    assert layout.parse_swap_file("3_9.tensor.swp") == (None, 3, 9)
    assert layout.parse_swap_file("exp_avg_sq-3_9.tensor.swp") == ("exp_avg_sq", 3, 9)
    assert layout.parse_swap_file("3_9_gradient_0_512.tensor.swp") is None


@pytest.mark.parametrize("tag", ["", ".", "..", "a/b", ".tmp-x", ".old-x", "a\0"])
def test_tags_that_are_no_folder_names(tag: str) -> None:
    assert not layout.valid_tag(tag)


def test_options() -> None:
    assert config.parse(None) is None
    assert config.parse(False) is None
    assert config.parse({"enabled": False}) is None
    assert config.parse(True) == config.Options()
    found = config.parse({"rng": False, "block_mib": 8})
    assert found is not None and not found.rng and found.block_mib == 8


@pytest.mark.parametrize(
    ("value", "text"),
    [({"nonsense": 1}, "nvme_checkpoint.nonsense"), ({"block_mib": 0}, "block_mib"), ("yes", "true, false")],
)
def test_bad_options_name_the_key(value: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config.parse(value)


@pytest.mark.parametrize(
    "kind", [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, NvmeResumeError)]
)
def test_errors_survive_pickling(kind: type[NvmeResumeError]) -> None:
    error = kind("words", rank=1, tag="t", path="p", offset=3, expected=1, found=2, hint="do that")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (
        str(copy)
        == str(error)
        == "[rank 1, tag t, file p, offset 3] words (expected 1, found 2). Next: do that"
    )


def test_log_lines_are_visible_whatever_the_root_logger_does() -> None:
    """Nothing configured; a library's first warning configured; the user set a level for us."""
    program = (
        "import logging, sys\n"
        "exec(sys.argv[1])\n"
        "from nvme_resume import logs\n"
        "logs.ensure_visible()\n"
        "logs.logger.info('committed it')\n"
    )
    for before, seen in (
        ("pass", True),
        ("logging.warning('x')", True),
        ("logging.basicConfig(level=logging.INFO)", True),
        ("logging.getLogger('nvme_resume').setLevel(logging.ERROR)", False),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program, before], capture_output=True, text=True, check=True
        )
        assert ("committed it" in done.stderr) == seen, before
        assert done.stderr.count("committed it") <= 1


def test_one_save_at_two_times_of_day_is_one_save() -> None:
    from nvme_resume import manifest
    from tests.nodes import fakes

    head = fakes.manifest(8)
    assert manifest.same_checkpoint(head, head.model_copy(update={"created": "a second later"}))
    assert not manifest.same_checkpoint(head, head.model_copy(update={"checkpoint_id": "another"}))
    assert not manifest.same_checkpoint(head, head.model_copy(update={"ranks": head.ranks[:4]}))
