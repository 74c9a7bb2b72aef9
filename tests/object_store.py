"""A real S3 server for tests: moto's, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness import free_port

KEYS = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "tests",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def start(port: int | None = None) -> Server:
    port = port or free_port()
    code = "import sys; from moto.server import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **KEYS},
    )
    server = Server(process, port)
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"{server.endpoint}/moto-api/", timeout=5).close()
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        else:
            return server


class Bucket:
    """One bucket, by a client that is none of ours."""

    def __init__(self, server: Server, name: str) -> None:
        import boto3

        self.name = name
        self.url = f"s3://{name}/run"
        self.client: Any = boto3.client("s3", endpoint_url=server.endpoint)
        self.client.create_bucket(Bucket=name)

    def objects(self) -> dict[str, Any]:
        """Names below ``run/``, each with what changes whenever it is written."""
        found = self.client.list_objects_v2(Bucket=self.name, Prefix="run/").get("Contents", [])
        return {o["Key"][4:]: (o["ETag"], o["LastModified"], o["Size"]) for o in found}

    def read(self, name: str) -> bytes:
        data: bytes = self.client.get_object(Bucket=self.name, Key=f"run/{name}")["Body"].read()
        return data

    def write(self, name: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=f"run/{name}", Body=data)

    def flip(self, name: str, at: int) -> None:
        data = bytearray(self.read(name))
        data[at] ^= 1
        self.write(name, bytes(data))


class Folder:
    """The same face for ``file://``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"file://{path}"

    def objects(self) -> dict[str, Any]:
        found = [p for p in sorted(self.path.rglob("*")) if p.is_file()]
        infos = [(p, p.stat()) for p in found]
        return {p.relative_to(self.path).as_posix(): (i.st_ino, i.st_mtime_ns, i.st_size) for p, i in infos}

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_bytes(data)

    def flip(self, name: str, at: int) -> None:
        Bucket.flip(self, name, at)  # type: ignore[arg-type]
