"""Hosts made of network namespaces: each with an address, a name, and a cable that can be pulled."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_NET = "10.213.0"


class Hosts:
    """Namespaces on one switch, which is a bridge in a namespace of its own."""

    def __init__(self, count: int) -> None:
        self.names = [f"nvr{os.getpid()}n{i}" for i in range(count)]
        self.switch = f"nvr{os.getpid()}sw"

    def make(self) -> None:
        _ip("netns", "add", self.switch)
        _in(self.switch, "link", "add", "br0", "type", "bridge")
        _in(self.switch, "link", "set", "br0", "up")
        for index, name in enumerate(self.names):
            _ip("netns", "add", name)
            _ip(
                "link",
                "add",
                "eth0",
                "netns",
                name,
                "type",
                "veth",
                "peer",
                f"port{index}",
                "netns",
                self.switch,
            )
            _in(self.switch, "link", "set", f"port{index}", "master", "br0", "up")
            _in(name, "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
            _in(name, "link", "set", "eth0", "up")
            _in(name, "link", "set", "lo", "up")

    def address(self, index: int) -> str:
        return f"{_NET}.{index + 1}"

    def pull(self, index: int) -> None:
        """The cable of a host: nothing gets through, and nobody is told."""
        _in(self.switch, "link", "set", f"port{index}", "nomaster")

    def plug(self, index: int) -> None:
        _in(self.switch, "link", "set", f"port{index}", "master", "br0")

    def remove(self) -> None:
        for name in [*self.names, self.switch]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def environments(self) -> list[dict[str, str]]:
        """What each rank's environment says in addition: where it lives, and how it talks to the others."""
        return [
            {"MASTER_ADDR": self.address(0), "GLOO_SOCKET_IFNAME": "eth0", "NVR_TEST_NAMESPACE": name}
            for name in self.names
        ]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _in(namespace: str, *arguments: str) -> None:
    _ip("-n", namespace, *arguments)


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """Skips the test where namespaces cannot be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and ip (iproute2)")
    made = Hosts(count)
    try:
        try:
            made.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        yield made
    finally:
        made.remove()
