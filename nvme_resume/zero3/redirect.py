"""A proxy around each aio handle of an engine, so that frozen swap files are read and never written.

Every request of DeepSpeed's swappers names a file (0.19.8, ``csrc/aio/py_lib/py_ds_aio.cpp``): reads of a frozen one go
to its private name, the first write ends that (``storage/snapshot.py``).  Only this engine's own handle attributes are
replaced, no class and no module is patched.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nvme_resume.storage.background import Gate
from nvme_resume.storage.snapshot import SwapFiles
from nvme_resume.zero3 import quiesce

_READS = ("read", "pread", "sync_pread", "async_pread")
_WRITES = ("write", "pwrite", "sync_pwrite", "async_pwrite")


class Redirected:
    """Stands for one ``aio_handle`` or ``gds_handle``; all that it does not know is the handle's own."""

    def __init__(self, handle: Any, files: SwapFiles, gate: Gate) -> None:
        self._nvme_handle = handle
        self._nvme_files = files
        self._nvme_gate = gate
        for name in _READS:
            if hasattr(handle, name):
                setattr(self, name, self._reading(getattr(handle, name)))
        for name in _WRITES:
            if hasattr(handle, name):
                setattr(self, name, self._writing(getattr(handle, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nvme_handle, name)

    def wait(self) -> Any:
        """The handle's own; afterwards the disk is free for background work."""
        try:
            return self._nvme_handle.wait()
        finally:
            self._nvme_gate.busy(False)

    def _reading(self, call: Any) -> Any:
        def read(buffer: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(filename, (str, os.PathLike)):
                filename = self._nvme_files.begin_read(os.fspath(filename))
            return self._call(call, buffer, filename, *args, **kwargs)

        return read

    def _writing(self, call: Any) -> Any:
        # The offset is the last of 1 to 3 further arguments, or named, or left out (0).
        most = {"write": 2, "pwrite": 3, "sync_pwrite": 1, "async_pwrite": 1}[call.__name__]

        def write(buffer: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(filename, (str, os.PathLike)):
                filename = os.fspath(filename)
                offset = kwargs.get("file_offset", args[-1] if len(args) == most else 0)
                self._nvme_files.begin_write(filename, int(offset), buffer.numel() * buffer.element_size())
            return self._call(call, buffer, filename, *args, **kwargs)

        return write

    def _call(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        self._nvme_gate.busy(True)
        try:
            return call(*args, **kwargs)
        finally:
            if not call.__name__.startswith("async_"):
                self._nvme_gate.busy(False)


def install(engine: Any, files: SwapFiles, gate: Gate) -> None:
    """Put a proxy in place of every handle this engine's swappers hold.  Harmless to repeat.

    Before that, owns the swap folders (LockedError when another job does) and makes the private ones, which removes
    those of processes that are gone.
    """
    proxies: dict[int, Redirected] = {}
    holders = list(_holders(engine))
    for holder in holders:
        if hasattr(holder, "swap_folder"):
            files.own(Path(holder.swap_folder))
            files.folder(Path(holder.swap_folder))
    for holder in holders:
        for name, value in list(vars(holder).items()):
            if _is_handle(value):
                proxy = proxies.setdefault(id(value), Redirected(value, files, gate))
                setattr(holder, name, proxy)


def _holders(engine: Any) -> Iterator[Any]:
    """Everything of an engine that keeps an aio handle (``runtime/swap_tensor``)."""
    swapper = getattr(engine.optimizer, "optimizer_swapper", None)
    if swapper is not None:
        yield from (swapper, swapper.gradient_swapper, swapper.swap_buffer_manager)
        yield from swapper.swap_params_info.values()
    if quiesce.param_swapper_of(engine) is not None:
        # zero.Init and the engine may have made one each.
        swappers = [getattr(param, "nvme_swapper", None) for param in engine.module.parameters()]
        yield from {id(s): s for s in swappers if s is not None}.values()


def _is_handle(value: object) -> bool:
    return hasattr(type(value), "async_pwrite")


def bare_holders() -> list[str]:
    """Types of the objects in this process that keep an aio handle without a proxy (for tests)."""
    found = []
    for item in gc.get_objects():
        if isinstance(item, Redirected):
            continue
        try:
            members = object.__getattribute__(item, "__dict__")  # runs no code of the object's own
        except AttributeError:
            continue
        if isinstance(members, dict) and any(_is_handle(v) for v in members.values()):
            found.append(type(item).__name__)
    return found
