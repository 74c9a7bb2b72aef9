"""Checkpoints go to a URL and come back: real files, moto's S3 server and ``file://``."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from nvme_resume import layout, manifest, uploads
from nvme_resume.config import Options, parse
from nvme_resume.errors import ConfigError, CorruptError, NoCheckpointError, ReplacedError, StorageError
from nvme_resume.manifest import FileRecord, Seal
from nvme_resume.peers import Peers
from nvme_resume.places import Place
from nvme_resume.storage import audit, catalog, download, gather, records, remote, transfer, upload
from nvme_resume.storage.background import Gate
from nvme_resume.storage.catalog import Saved
from nvme_resume.storage.limit import Limit
from nvme_resume.storage.remote import Remote
from nvme_resume.storage.upload import Moved, Part
from tests import object_store
from tests.storage import test_catalog

Store = object_store.Bucket | object_store.Folder
BIG = (20 << 20) + 5  # three blocks, and parts of an object


def make(save_dir: Path, step: int = 2, world_size: int = 2) -> Path:
    """A sealed checkpoint; rank 1 has a large file, rank 0 an empty one."""
    tag = f"t{step}"
    folder = test_catalog.make(save_dir, tag, step, world_size)
    head = records.read_manifest(folder)
    entries = []
    for rank in range(world_size):
        record, _, _ = records.read_rank(folder, head, rank)
        name = layout.swap_path(rank, "0_1.tensor.swp")
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(os.urandom(BIG) if rank == 1 else b"")
        names = [*record.files, name]
        copies = [transfer.Copy(folder / n) for n in names]
        seals = dict(zip(names, transfer.run(copies, Options(), what="t", sync=False), strict=True))
        files = {n: FileRecord(size=s.size) for n, s in seals.items()}
        record = record.model_copy(update={"files": files})
        digest = manifest.digest_of(record)
        entries.append(head.ranks[rank].model_copy(update={"record": digest}))
        (folder / layout.rank_record(rank)).unlink()
        records.write(folder, layout.rank_record(rank), record)
        seal = Seal(checkpoint_id=tag, rank=rank, record_digest=digest, files=seals)
        records.write(folder, layout.seal(rank), seal)
    (folder / layout.manifest()).unlink()
    records.write(
        folder, layout.manifest(), head.model_copy(update={"ranks": tuple(entries), "sealed": True})
    )
    return folder


def anew(folder: Path, checkpoint_id: str) -> Path:
    """The same files as another save of the same tag."""
    head = records.read_manifest(folder)
    entries = []
    for rank in range(head.world_size):
        old = records.read_rank(folder, head, rank)
        assert old.seal is not None
        record = old.record.model_copy(update={"checkpoint_id": checkpoint_id})
        extras = old.extras.model_copy(update={"checkpoint_id": checkpoint_id})
        digests = {"record": manifest.digest_of(record), "extras": manifest.digest_of(extras)}
        seal = old.seal.model_copy(
            update={"checkpoint_id": checkpoint_id, "record_digest": digests["record"]}
        )
        for name, item in (
            (layout.rank_record(rank), record),
            (layout.extras(rank), extras),
            (layout.seal(rank), seal),
        ):
            (folder / name).unlink()
            records.write(folder, name, item)
        entries.append(head.ranks[rank].model_copy(update=digests))
    (folder / layout.manifest()).unlink()
    update = {"checkpoint_id": checkpoint_id, "ranks": tuple(entries)}
    records.write(folder, layout.manifest(), head.model_copy(update=update))
    return folder


def part(folder: Path, *ranks: int, latest: bool = True) -> Part:
    saved = committed(folder)
    return Part(saved.save_dir, saved.tag, saved.checkpoint_id, ranks, publishes=0 in ranks, latest=latest)


def committed(folder: Path) -> Saved:
    """As a save tells it that has just committed the folder."""
    return Saved(folder.parent, folder.name, records.read_manifest(folder).checkpoint_id, sealing=True)


def put(folder: Path, store: Store, *ranks: int, seconds: float = 30.0) -> Moved:
    return upload.upload(part(folder, *(ranks or (0, 1))), Remote(store.url), seconds)


def get(store: Store, tag: str, into: Path, *ranks: int) -> int:
    source = Remote(store.url)
    head = download.head_of(source, tag)
    into.mkdir(exist_ok=True)
    return download.fetch(source, head, ranks or range(head.world_size), into, Options())


def test_there_and_back(tmp_path: Path, store: Store) -> None:
    folder = make(tmp_path / "ck")
    assert put(folder, store) == Moved(BIG + 40, 6)
    names = {p.relative_to(folder.parent).as_posix() for p in folder.rglob("*") if p.is_file()}
    there = store.objects()
    assert set(there) == {*names, layout.LATEST} and store.read(layout.LATEST) == b"t2"

    assert put(folder, store) == Moved(0, 0)
    assert store.objects() == there  # nothing was written again

    assert download.choose(Remote(store.url), None) == "t2"
    assert get(store, "t2", tmp_path / "back") == BIG + 40
    audit.check(tmp_path / "back" / "t2", "full")
    for name in (n for n in names if not n.endswith(".json")):
        assert (folder.parent / name).read_bytes() == (tmp_path / "back" / name).read_bytes()
    assert get(store, "t2", tmp_path / "back") == 0


def test_each_place_uploads_its_ranks_and_the_manifest_waits_for_all(tmp_path: Path, store: Store) -> None:
    folder = make(tmp_path / "ck")
    with pytest.raises(StorageError, match=r"ranks \[1\] did not upload their part within 0 s"):
        put(folder, store, 0, seconds=0.2)
    assert not [n for n in store.objects() if "manifest" in n or "rank01" in n or n == "latest"]
    with pytest.raises(NoCheckpointError, match="no complete checkpoint under this URL"):
        download.choose(Remote(store.url), None)
    with pytest.raises(NoCheckpointError, match="no such checkpoint"):
        download.choose(Remote(store.url), "t2")

    other = threading.Timer(0.5, put, (folder, store, 1))
    other.start()
    assert put(folder, store, 0) == Moved(0, 0)
    other.join()
    # A node whose manifest has another time of day, as in older versions, does not take it for another checkpoint's.
    head = records.read_manifest(folder)
    (folder / layout.manifest()).unlink()
    records.write(folder, layout.manifest(), head.model_copy(update={"created": "2026-01-01T00:00:01+00:00"}))
    put(folder, store, 1)
    assert download.choose(Remote(store.url), None) == "t2"
    assert get(store, "t2", tmp_path / "one", 1) == BIG + 20
    assert not list((tmp_path / "one").rglob("*rank00*"))


def test_the_newest_complete_one_where_latest_names_none(tmp_path: Path, store: Store) -> None:
    for step in (9, 10):
        put(make(tmp_path / "ck", step), store)
    store.write(layout.LATEST, b"t11")
    assert download.choose(Remote(store.url), None) == "t10"
    assert download.choose(Remote(store.url), None, {"t10"}) == "t9"
    assert download.choose(Remote(store.url), "t9") == "t9"
    assert download.look(Remote(store.url), None) == (records.read_manifest(tmp_path / "ck" / "t10"), (0, 1))
    with pytest.raises(ConfigError, match="usable tag"):
        download.choose(Remote(store.url), "../t9")


def test_one_flipped_byte_under_the_url_is_found_and_named(tmp_path: Path, store: Store) -> None:
    put(make(tmp_path / "ck"), store)
    name = f"t2/{layout.swap_path(1, '0_1.tensor.swp')}"
    store.flip(name, 9 << 20)
    with pytest.raises(CorruptError) as caught:
        get(store, "t2", tmp_path / "back")
    assert (caught.value.rank, caught.value.offset) == (1, 8 << 20)
    assert caught.value.path == f"{store.url}/{name}"
    assert not (tmp_path / "back" / "t2").exists()
    store.flip(name, 9 << 20)
    # What had arrived before the bad chunk is not fetched again.
    assert get(store, "t2", tmp_path / "back") < BIG - (7 << 20)
    audit.check(tmp_path / "back" / "t2", "full")


@pytest.mark.parametrize("how", ["longer", "shorter", "gone"])
def test_an_object_of_another_size_is_refused(tmp_path: Path, store: Store, how: str) -> None:
    put(make(tmp_path / "ck"), store)
    name = f"t2/{layout.swap_path(1, '0_1.tensor.swp')}"
    data = store.read(name)
    store.write(name, {"longer": data + b"x", "shorter": data[:-1], "gone": b""}[how])
    with pytest.raises(CorruptError, match="not the file that was saved"):
        get(store, "t2", tmp_path / "back")


def test_a_damaged_source_never_appears(tmp_path: Path, store: Store) -> None:
    folder = make(tmp_path / "ck")
    file = folder / layout.swap_path(1, "0_1.tensor.swp")
    content = bytearray(file.read_bytes())
    content[17 << 20] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptError) as caught:
        put(folder, store)
    assert (caught.value.path, caught.value.offset, caught.value.rank) == (str(file), 16 << 20, 1)
    there = store.objects()
    assert f"t2/{layout.swap_path(1, file.name)}" not in there
    assert f"t2/{layout.manifest()}" not in there and f"t2/{layout.rank_record(1)}" not in there


def test_what_was_damaged_on_the_way_is_put_again(tmp_path: Path, store: Store) -> None:
    """Left by an upload that was cut: right, short, and wrong files.  Only the right one stays as it is."""
    folder = make(tmp_path / "ck")
    put(folder, store, 1)
    before = store.objects()
    short, wrong = f"t2/{layout.swap_path(1, '0_1.tensor.swp')}", "t2/model1.pt"
    store.write(short, store.read(short)[: 5 << 20])
    store.flip(wrong, 3)
    store.write(f"t2/{layout.rank_record(1)}", b"{")
    assert put(folder, store).nbytes == BIG + 10 + 20  # of rank 0 its 20
    after = store.objects()
    assert {n for n in before if before[n] == after[n]} >= {"t2/optim1.pt"}
    get(store, "t2", tmp_path / "back")
    audit.check(tmp_path / "back" / "t2", "full")


def test_a_tag_that_is_saved_again_is_replaced(tmp_path: Path, store: Store) -> None:
    put(make(tmp_path / "ck"), store)
    shutil.rmtree(tmp_path / "ck")
    folder = make(tmp_path / "ck", world_size=1)
    put(folder, store, 0)
    assert download.head_of(Remote(store.url), "t2").world_size == 1


def test_a_tag_that_is_saved_again_while_its_parts_come_at_different_speeds(
    tmp_path: Path, store: Store
) -> None:
    """The place of rank 1 still uploads its part of the first save when that of rank 0 is at the second."""
    first, second = make(tmp_path / "first"), anew(make(tmp_path / "second"), "another")
    put(first, store, 1)
    with pytest.raises(StorageError, match=r"ranks \[1\] did not upload"):
        put(second, store, 0, seconds=0.2)
    late = part(first, 1)
    replaced = tmp_path / "first" / "t2"
    shutil.rmtree(replaced)
    shutil.copytree(second, replaced)
    with pytest.raises(ReplacedError):
        upload.upload(late, Remote(store.url), 5)
    with pytest.raises(NoCheckpointError):
        download.choose(Remote(store.url), "t2")
    put(replaced, store, 1)
    put(second, store, 0)
    get(store, "t2", tmp_path / "back")
    audit.check(tmp_path / "back" / "t2", "full")
    assert records.read_manifest(tmp_path / "back" / "t2").checkpoint_id == "another"


def test_killed_in_the_middle(tmp_path: Path, store: Store) -> None:
    """kill -9 between two blocks: no manifest, and what is complete is not moved again."""
    folder = make(tmp_path / "ck")
    code = (
        "import os, sys; from pathlib import Path\n"
        "from nvme_resume.storage import upload; from nvme_resume.storage.remote import Remote\n"
        "from tests.storage.test_remote import part\n"
        "left = [14]\n"
        "def breathe():\n"
        "    left[0] -= 1\n"
        "    if not left[0]: os.kill(os.getpid(), 9)\n"
        "upload.upload(part(Path(sys.argv[1]), 0, 1), Remote(sys.argv[2], breathe), 30)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, folder, store.url], cwd=Path(__file__).parents[2])
    assert done.returncode == -9
    cut = store.objects()
    assert cut and not [n for n in cut if n.endswith(("manifest.json", "latest", "rank01.json"))]
    moved = put(folder, store)
    assert 0 < moved.files < 6
    after = store.objects()
    whole = [n for n in cut if cut[n] == after[n]]
    assert "t2/optim0.pt" in whole and "t2/nvme_resume/rank00.json" in whole
    get(store, "t2", tmp_path / "back")
    audit.check(tmp_path / "back" / "t2", "full")


def test_records_nobody_can_read_are_written_anew(tmp_path: Path, store: Store) -> None:
    """Damaged ones, and those of a newer version that used the same tag."""
    folder = make(tmp_path / "ck")
    put(folder, store)
    newer = store.read(f"t2/{layout.manifest()}").replace(b'"format": 1', b'"format": 2')
    store.write(f"t2/{layout.manifest()}", newer)
    store.write(f"t2/{layout.rank_record(0)}", b"{")
    store.write(f"t2/{layout.rank_record(1)}", newer.replace(b'"manifest"', b'"rank"'))
    assert put(folder, store) == Moved(0, 0)
    get(store, "t2", tmp_path / "back")
    audit.check(tmp_path / "back" / "t2", "full")


def test_a_trainers_files_come_back_too(tmp_path: Path, store: Store) -> None:
    folder = make(tmp_path / "ck")
    for name in ("trainer_state.json", "rng_state_1.pth", "adapter/weights.bin"):
        store.write(f"checkpoint-2/{name}", name.encode())
    for name in ("latest", ".hidden", "adapter/.hidden"):
        store.write(f"checkpoint-2/{name}", b"t2")
    upload.upload(part(folder, 0, 1), Remote(f"{store.url}/checkpoint-2"), 30)
    into = tmp_path / "checkpoint-2"
    into.mkdir()
    (into / "trainer_state.json").write_bytes(b"mine")
    for moved in (BIG + 40 + len("rng_state_1.pth") + len("adapter/weights.bin"), 0):
        found = gather.gather([Remote(f"{store.url}/checkpoint-2")], into, None, Options(), show=False)
        assert found.moved == moved
    audit.check(into / "t2", "full")
    assert (into / "rng_state_1.pth").read_text() == "rng_state_1.pth"
    assert (into / "adapter" / "weights.bin").read_text() == "adapter/weights.bin"
    assert (into / "trainer_state.json").read_bytes() == b"mine"  # what is there stays
    names = {p.name for p in into.rglob("*")}
    assert not {".hidden"} & names and not [n for n in names if n.startswith(".tmp-")]


def test_a_folder_that_is_no_trainers_brings_nothing_else(tmp_path: Path, store: Store) -> None:
    put(make(tmp_path / "ck"), store)
    store.write("notes.txt", b"of somebody")
    into = tmp_path / "into"
    into.mkdir()
    gather.gather([Remote(store.url)], into, None, Options(), show=False)
    assert not (into / "notes.txt").exists()


# ---- behind the training ----


def engine_side(url: str, **options: object) -> uploads.Uploads:
    return uploads.Uploads(Options(upload=url, **options), Peers(10), Gate(), Limit(0))  # type: ignore[arg-type]


def is_over(work: uploads.Uploads, seconds: float = 0.0) -> bool:
    """As ``wait_for_checkpoint`` asks."""
    if not work.ended(seconds):
        return False
    work.raise_failure()
    return True


def place(*ranks: int) -> Place:
    return Place(ranks, True, (ranks,))


def until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_failed_upload_is_told_and_tried_again_with_the_next_save(tmp_path: Path, bucket: Store) -> None:
    one, two = make(tmp_path / "ck", 1), make(tmp_path / "ck", 2)
    assert isinstance(bucket, object_store.Bucket)
    absent = f"no-{bucket.name}"
    work = engine_side(f"s3://{absent}/run")
    work.begin(committed(one), place(0, 1), latest=True)
    with pytest.raises(StorageError, match="bucket") as caught:
        while not is_over(work, 1):
            pass
    assert caught.value.path is not None and caught.value.path.startswith(f"s3://{absent}/run/t1/")
    assert is_over(work) and not catalog.is_used(one) and work.owed()

    bucket.client.create_bucket(Bucket=absent)
    work.begin(committed(two), place(0, 1), latest=True)
    until(lambda: is_over(work, 0.1))
    found = bucket.client.list_objects_v2(Bucket=absent)["Contents"]
    assert {o["Key"] for o in found} >= {f"run/{t}/{layout.manifest()}" for t in ("t1", "t2")}
    # The older one went first, and did not take ``latest`` along afterwards.
    assert bucket.client.get_object(Bucket=absent, Key="run/latest")["Body"].read() == b"t2"
    work.close()


def test_no_server_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {**object_store.KEYS, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(key, value)
    work = engine_side("s3://bucket/run")
    folder = make(tmp_path / "ck")
    work.begin(committed(folder), place(0, 1), latest=True)
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:9"):
        while not is_over(work, 1):
            pass
    work.close()


def test_what_fails_after_the_first_error_is_not_logged_by_asyncio(caplog: pytest.LogCaptureFixture) -> None:
    """It would be, with its trace, at some later time: whenever memory is collected."""

    def fail(seconds: float) -> None:
        time.sleep(seconds)
        raise OSError(f"after {seconds} s")

    async def one(seconds: float) -> None:
        await remote.in_thread(partial(fail, seconds))

    with pytest.raises(OSError, match=r"after 0\.0 s"):
        asyncio.run(remote.each([0.0, 0.3, 0.3], one))
    gc.collect()
    assert not caplog.records


def test_what_is_removed_meanwhile_is_no_error(tmp_path: Path) -> None:
    folder = make(tmp_path / "ck")
    seal = folder / layout.seal(0)
    kept = seal.rename(seal.with_suffix(".kept"))
    work = engine_side(f"file://{tmp_path}/store", timeout_seconds=20)
    work.begin(committed(folder), place(0, 1), latest=True)
    assert catalog.is_used(folder) and not work.ended(0.2)  # it waits for the hashes
    kept.rename(tmp_path / "seal")
    shutil.rmtree(folder)
    until(lambda: is_over(work, 0.1))
    assert not catalog.is_used(folder)
    work.close()


def test_hashes_that_come_late_are_waited_for(tmp_path: Path) -> None:
    folder = make(tmp_path / "ck")
    seal = folder / layout.seal(1)
    kept = seal.rename(tmp_path / "seal")
    threading.Timer(0.5, kept.rename, (seal,)).start()
    assert put(folder, object_store.Folder(tmp_path / "store")).files == 6


# ---- options ----


def test_a_missing_package_is_one_clear_error_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.setitem(sys.modules, "s3fs.core", None)
    monkeypatch.setattr(sys.modules["fsspec.registry"], "_registry", {})
    monkeypatch.setattr(sys.modules["fsspec.registry"], "registry", {})
    options = Options(upload="s3://bucket/run")
    with pytest.raises(ConfigError, match="pip install s3fs"):
        uploads.check(options, uses_nvme=True)


@pytest.mark.parametrize("url", ["/mnt/ck", "ck", 7, ""])
def test_a_path_is_no_url(url: object) -> None:
    with pytest.raises(ConfigError, match=r"nvme_checkpoint\.upload"):
        parse({"upload": url})


def test_other_urls_and_engines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a URL that fsspec can open"):
        uploads.check(Options(upload="nowhere://x/y"), uses_nvme=True)
    with pytest.raises(ConfigError, match="state on NVMe"):
        uploads.check(Options(upload=f"file://{tmp_path}"), uses_nvme=False)
