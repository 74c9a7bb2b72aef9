"""Committed checkpoints go to object storage, and come back: a real S3 server (moto's) and ``file://``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from nvme_resume.errors import ConfigError
from nvme_resume.storage import audit, records, remote
from tests import harness
from tests.nodes import cases

BUCKET = "checkpoints"
MANIFEST = f"{cases.TAG}/nvme_resume/manifest.json"


class Server:
    """An S3 server with one bucket."""

    def __init__(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        self.client = boto3.client(
            "s3", endpoint_url=self.environment["AWS_ENDPOINT_URL"], aws_access_key_id="key",
            aws_secret_access_key="secret", region_name="us-east-1",
        )  # fmt: skip
        self.client.create_bucket(Bucket=BUCKET)

    def objects(self) -> dict[str, Any]:
        found = self.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return {o["Key"]: (o["Size"], o["LastModified"]) for o in found}

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.stop()


def test_two_nodes_and_one_bucket(tmp_path: Path, server: Server) -> None:
    """Each node uploads its own part and downloads no other."""
    url = f"s3://{BUCKET}/run"
    both = [server.environment] * 2
    whole = cases.saved(tmp_path, 2, {"upload": url}, environments=both)
    before = server.objects()
    assert f"run/{MANIFEST}" in before and "run/latest" in before
    assert max(before.values(), key=lambda o: o[1])[1] == before["run/latest"][1]

    for node in (0, 1):
        cases.replace_disk(tmp_path, node)
    options = {"upload": url, "download_dir": "downloads"}
    cases.assert_resumes(
        tmp_path, whole, options, load=url, environments=both, saves=[{**cases.SAVE, "at": 3}]
    )
    for node in (0, 1):
        (folder,) = [p for p in (tmp_path / "nodes" / f"node{node}" / "downloads").iterdir() if p.is_dir()]
        assert cases.ranks_in(folder) == [node]
    after = server.objects()
    assert "run/global_step3/nvme_resume/manifest.json" in after
    assert {k: v for k, v in after.items() if k in before and k != "run/latest"} == {
        k: v for k, v in before.items() if k != "run/latest"
    }

    # In another world size, without a folder of the user's: nothing of the download stays.
    alone = harness.run(
        tmp_path, "alone", 1, **cases.CASE, seed=3, load={"dir": url, "tag": cases.TAG},
        environments=[server.environment],
    )  # fmt: skip
    assert alone.ranks[0]["start"] == 2 and len(alone.ranks[0]["losses"]) == 2
    downloads = tmp_path / "nvme-alone" / "zero_stage_3" / "nvme_resume_downloads"
    assert [p.name for p in downloads.iterdir() if p.is_dir()] == []

    # One bit of one object.
    key = next(k for k in after if k.startswith("run/global_step3/") and k.endswith(".swp"))
    body = bytearray(server.client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    body[-1] ^= 1
    server.client.put_object(Bucket=BUCKET, Key=key, Body=bytes(body))
    found = harness.run(
        tmp_path, "damaged", 2, **{**cases.CASE, "until": 0}, environments=both,
        failing_loads=[{"dir": url, "tag": "global_step3"}, {"dir": f"s3://{BUCKET}/elsewhere"}],
    )  # fmt: skip
    for rank in found.ranks:
        flipped, absent = rank["failures"]
        assert flipped["type"] == "CorruptError" and key in flipped["text"] and flipped["untouched"], flipped
        assert absent["type"] == "NoCheckpointError" and "elsewhere" in absent["text"] and absent["untouched"]


def test_an_upload_that_was_cut_goes_on(tmp_path: Path) -> None:
    """Killed in the middle: no manifest there; the next run moves what is missing, and nothing again."""
    bucket = tmp_path / "bucket"
    url = bucket.as_uri()
    slow = {"upload": url, "network_limit_mib": 1.0}

    def kill(processes: list[Any]) -> None:
        deadline = time.monotonic() + 120
        while len(list(bucket.rglob("*.swp"))) < 7:  # four at a time
            assert time.monotonic() < deadline
            time.sleep(0.02)
        processes[0].kill()

    case = {**cases.CASE, "saves": [{**cases.SAVE, "dir": str(tmp_path / "ck")}]}
    cut = harness.run(tmp_path, "cut", 1, check=False, **case, nvme_checkpoint=slow, meanwhile=kill)
    assert cut.codes == [-9]
    assert not (bucket / MANIFEST).exists() and not (bucket / "latest").exists()
    before = {p: p.stat().st_mtime_ns for p in bucket.rglob("*.swp")}

    whole = harness.run(tmp_path, "whole", 1, **case, nvme_checkpoint={"upload": url})
    # The same tag, another run, the same bits: whole files are taken over, the one that was cut is not.
    audit.check(bucket / cases.TAG, "full")
    same = [p for p, time_ns in before.items() if p.stat().st_mtime_ns == time_ns]
    assert len(same) >= 2, before
    resumed = harness.run(tmp_path, "resumed", 1, **cases.CASE, seed=2, load=url)
    assert resumed.ranks[0]["losses"] == whole.ranks[0]["losses"][2:]


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    """The training goes on; who waits for the checkpoint hears of it."""
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{harness.free_port()}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_MAX_ATTEMPTS": "1",
    }
    case = {**cases.CASE, "saves": [{"at": 2, "dir": str(tmp_path / "ck")}]}
    found = harness.run(
        tmp_path, "alone", 1, check=False, **case, nvme_checkpoint={"upload": f"s3://{BUCKET}/run"},
        environments=[environment],
    )  # fmt: skip
    assert len(found.ranks[0]["losses"]) == 4
    assert found.errors[0]["type"] == "StorageError" and f"s3://{BUCKET}/run" in found.errors[0]["text"]
    assert "training goes on" in (tmp_path / "log-alone.0.txt").read_text()
    audit.check(tmp_path / "ck" / cases.TAG, "full")


def test_a_package_that_is_missing_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match="pip install gcsfs"):
        remote.check("gs://bucket/run")
    with pytest.raises(ConfigError, match="not a URL"):
        remote.check("nonsense://x")


def test_a_file_that_changed_since_it_was_hashed_is_not_uploaded(tmp_path: Path) -> None:
    from nvme_resume.storage import upload

    folder = tmp_path / "ck"
    harness.run(
        tmp_path, "saved", 1, **{**cases.CASE, "until": 2, "saves": [{**cases.SAVE, "dir": str(folder)}]}
    )
    file = next((folder / cases.TAG).rglob("*.swp"))
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    saved = records.read_manifest(folder / cases.TAG).checkpoint_id
    part = upload.Part(folder, cases.TAG, saved, (0,), publishes=True, latest=True)
    url = (tmp_path / "bucket").as_uri()
    with pytest.raises(Exception, match=file.name) as caught:
        upload.upload(part, remote.Remote(url), 10)
    assert type(caught.value).__name__ == "CorruptError"
    assert not list((tmp_path / "bucket").rglob(file.name)) and not (tmp_path / "bucket" / MANIFEST).exists()
