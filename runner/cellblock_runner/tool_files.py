"""The files of `mcptools`: what the host generates, put where cells can import it.

    mcptools/__init__.py                the index of all servers
    mcptools/<server>/__init__.py       the index of one
    mcptools/<server>/<tool>.py
    mcptools/<server>/.generated        names and digests of what was written here

Files are compared first: what is there already is not touched, so that several sessions can share a folder. Each file gets its place in one step, its
server's index last, because a new index is how `tool_modules` notices. Removed is only what was written here and has not been changed since; whatever else
lies in these folders is the user's. No link is followed.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from .files import FOLDER_FLAGS, TEMPORARY, FileRefused, open_folder, refusals

FOLDER = "mcptools"
_INDEX = "__init__.py"
_RECORD = ".generated"
# Names and digests of a thousand tools fit.
_LARGEST_RECORD = 1024 * 1024


class Delivery:
    """Files on their way, one server after another: its index and its removals wait for its last frame."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._refused: FileRefused | None = None
        self._server = ""
        self._index: bytes | None = None
        self._digests: dict[str, str] = {}
        self._has_changed = False

    def take(self, server: str, files: Sequence[Any], payload: bytes, last: bool) -> None:
        """Writes files of a server. With the last of them, removes those that it has no more; without any, all of them.

        What cannot be done is told by `finish`; the other servers do not suffer from it.
        """
        try:
            self._take(server, files, payload, last)
        except FileRefused as refused:
            self._refused = self._refused or refused
            self._server = ""

    def finish(self, index: bytes, servers: Sequence[str] | None) -> None:
        """Writes the index of all servers. Raises FileRefused when this, or something before, could not be done."""
        refused, self._refused = self._refused, None
        _finish(self._root, index, servers)
        if refused is not None:
            raise refused

    def _take(self, server: str, files: Sequence[Any], payload: bytes, last: bool) -> None:
        if server != self._server:
            self._begin(server)
        _check(server)
        if files:
            with _folder(self._root, FOLDER, server, create=True) as folder:
                for name, data in _cut(files, payload):
                    self._write(folder, name, data)
        if last:
            self._finish_server()

    def _begin(self, server: str) -> None:
        self._server, self._index, self._digests, self._has_changed = server, None, {}, False

    def _write(self, folder: int, name: str, data: bytes) -> None:
        _check(name.removesuffix(".py"))
        self._digests[name] = hashlib.sha256(data).hexdigest()
        if name == _INDEX:
            self._index = data
        elif _read(folder, name, len(data) + 1) != data:
            _put(folder, name, data)
            self._has_changed = True

    def _finish_server(self) -> None:
        server, self._server = self._server, ""
        if not self._digests:
            _remove_server(self._root, server)
            return
        with _folder(self._root, FOLDER, server, create=True) as folder:
            earlier = _record(folder)
            gone = {name: digest for name, digest in earlier.items() if name not in self._digests}
            _remove(folder, gone)
            if self._digests != earlier:
                _put(folder, _RECORD, json.dumps(self._digests, indent=0, sort_keys=True).encode())
            index = self._index or b""
            if self._has_changed or gone or _read(folder, _INDEX, len(index) + 1) != index:
                _put(folder, _INDEX, index)


def _finish(root: str, index: bytes, servers: Sequence[str] | None) -> None:
    """Writes the index of all servers; an empty one is none. With `servers`, packages of others that were written here are removed."""
    if servers is not None:
        for other in _others(root, servers):
            _remove_server(root, other)
    if index:
        with _folder(root, FOLDER, create=True) as folder:
            if _read(folder, _INDEX, len(index) + 1) != index:
                _put(folder, _INDEX, index)
                _put(folder, _RECORD, json.dumps({_INDEX: hashlib.sha256(index).hexdigest()}).encode())
        return
    with suppress(FileRefused), _folder(root, FOLDER, create=False) as folder:
        if _remove(folder, _record(folder)):
            _unlink(folder, _RECORD)
    with suppress(OSError):
        os.rmdir(os.path.join(root, FOLDER))


def _remove_server(root: str, server: str) -> None:
    """Removes what was written for a server, and its folder when nothing else is in it."""
    try:
        with _folder(root, FOLDER, server, create=False) as folder:
            _remove(folder, _record(folder))
            _unlink(folder, _RECORD)
    except FileRefused:
        return  # There is none, or it is the user's.
    with suppress(OSError, FileRefused), _folder(root, FOLDER, create=False) as parent:
        os.rmdir(server, dir_fd=parent)


def _others(root: str, servers: Sequence[str]) -> list[str]:
    """Returns the folders beside those of `servers` in which something was written here."""
    with suppress(FileRefused, OSError), _folder(root, FOLDER, create=False) as folder:
        names = [name for name in os.listdir(folder) if name not in servers and name.isidentifier()]
        return [name for name in names if _is_file(folder, f"{name}/{_RECORD}")]
    return []


def _is_file(folder: int, name: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(name, dir_fd=folder).st_mode)
    except OSError:
        return False


def _cut(files: Sequence[Any], payload: bytes) -> Iterator[tuple[str, bytes]]:
    start = 0
    for entry in files:
        name, size = str(entry["name"]), int(entry["size"])
        yield name, payload[start : start + size]
        start += size


def _check(name: str) -> None:
    if not name.isidentifier():
        raise FileRefused("other", f"{name!r} cannot be the name of a module")


@contextmanager
def _folder(root: str, *parts: str, create: bool) -> Iterator[int]:
    path = "/".join(parts)
    with refusals(path):
        folder = os.open(root, FOLDER_FLAGS)
    try:
        for part in parts:
            inner = open_folder(folder, part, path, create)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


def _read(folder: int, name: str, limit: int) -> bytes | None:
    """Returns the first bytes of a regular file, or None when there is none."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return None
        data = bytearray()
        while len(data) < limit and (piece := os.read(file, limit - len(data))):
            data += piece
        return bytes(data)
    finally:
        os.close(file)


def _put(folder: int, name: str, data: bytes) -> None:
    """Puts a file in its place in one step. A link there is replaced, not followed."""
    temporary = TEMPORARY + os.urandom(8).hex()
    with refusals(name):
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=folder)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(file, view) :]
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            _unlink(folder, temporary)
            raise
        finally:
            os.close(file)


def _record(folder: int) -> dict[str, str]:
    """Returns names and digests of what was written here earlier, as far as that can be read."""
    try:
        record = json.loads(_read(folder, _RECORD, _LARGEST_RECORD) or b"{}")
    except ValueError:
        return {}
    if not isinstance(record, dict):
        return {}
    return {name: digest for name, digest in record.items() if name.removesuffix(".py").isidentifier()}


def _remove(folder: int, names: dict[str, str]) -> bool:
    """Removes files that are still what was written, with what Python has made of them. Tells whether all are gone."""
    all_gone = True
    for name, digest in names.items():
        size = _size(folder, name)
        if size is None:
            continue
        if hashlib.sha256(_read(folder, name, size + 1) or b"").hexdigest() != digest:
            all_gone = False
            continue
        _unlink(folder, name)
        _forget_compiled(folder, name)
    with suppress(OSError):
        os.rmdir("__pycache__", dir_fd=folder)
    return all_gone


def _forget_compiled(folder: int, name: str) -> None:
    try:
        compiled = os.open("__pycache__", FOLDER_FLAGS, dir_fd=folder)
    except OSError:
        return
    try:
        own = name.removesuffix("py")
        for other in os.listdir(compiled):
            if other.startswith(own) and other.endswith(".pyc"):
                _unlink(compiled, other)
    finally:
        os.close(compiled)


def _size(folder: int, name: str) -> int | None:
    try:
        return os.lstat(name, dir_fd=folder).st_size
    except OSError:
        return None


def _unlink(folder: int, name: str) -> None:
    with suppress(OSError):
        os.unlink(name, dir_fd=folder)
