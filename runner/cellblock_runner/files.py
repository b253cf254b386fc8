"""Files: requests for files below the working folder, and changes to it by a cell.

A path is walked component by component with descriptors, and no link is followed, so a request
cannot leave the folder even if user code moves things around meanwhile. Only regular files are read
or replaced. An upload becomes visible atomically, complete, or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import Any

# Limits on the entries (of any kind) and levels that are checked after each cell. Beyond them,
# changes are not tracked.
MAX_FOLLOWED = 1000
DEEPEST_FOLLOWED = 16
# Limit on the entries (of any kind) that are checked for a list of files.
MAX_LISTED = 100_000
# Limit on the entries in each list of a report.
MAX_ENTRIES = 50

_CHUNK_SIZE = 1024 * 1024
TEMPORARY = ".cellblock-upload-"
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_REASONS = {
    errno.ENOENT: "missing",
    errno.EEXIST: "exists",
    errno.EISDIR: "not_a_file",
    errno.ENXIO: "not_a_file",
    errno.ELOOP: "not_a_file",
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EFBIG: "no_space",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.EROFS: "denied",
}

# Maps a path to the file's state: size, modification time, inode.
FolderState = dict[str, tuple[int, int, int]]


class FileRefused(Exception):
    """A request that cannot be fulfilled. `reason` is one of the words in PROTOCOL.md."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def read_pieces(root: str, path: str, limit: int | None) -> Iterator[bytes]:
    """Yields the bytes of a regular file. Raises FileRefused, at the latest after more than `limit`
    bytes.
    """
    file, status = _open_file(root, path)
    try:
        read = 0
        if limit is not None and status.st_size > limit:
            raise FileRefused(
                "too_large", f"{path} has {status.st_size} bytes; the limit is {limit}"
            )
        while True:
            with refusals(path):
                piece = os.read(file, _CHUNK_SIZE)
            if not piece:
                return
            read += len(piece)
            if limit is not None and read > limit:
                raise FileRefused("too_large", f"{path} grew beyond the limit of {limit} bytes")
            yield piece
    finally:
        os.close(file)


class FilePart:
    """A part of a regular file: its bytes, and the size and version of the whole file."""

    def __init__(self, root: str, path: str, offset: int, length: int) -> None:
        self._path = path
        self._offset = offset
        self._left = length
        self._file, status = _open_file(root, path)
        self.total = status.st_size
        self.version = _version(status)

    def pieces(self) -> Iterator[bytes]:
        """Yields the bytes. Raises FileRefused on errors, and also if the file has changed at the
        end. Closes the file.
        """
        try:
            with refusals(self._path):
                while self._left > 0 and (
                    piece := os.pread(self._file, min(_CHUNK_SIZE, self._left), self._offset)
                ):
                    yield piece
                    self._offset += len(piece)
                    self._left -= len(piece)
                if _version(os.fstat(self._file)) != self.version:
                    raise FileRefused("other", f"{self._path} changed while it was read")
        finally:
            os.close(self._file)


def listing(root: str, limit: int) -> tuple[list[dict[str, Any]], int]:
    """Returns the first `limit` files below `root` in the order of their paths, and how many more
    were found.

    Folders that `snapshot` skips are skipped here too, and so are entries beyond the limits.
    """
    found: list[tuple[str, int]] = []
    unseen = 0
    entries_left = MAX_LISTED
    folders = [(root, "", 0)]
    while folders:
        folder, prefix, depth = folders.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    entries_left -= 1
                    if entries_left < 0:
                        unseen += 1
                        break
                    name = entry.name
                    if entry.is_dir(follow_symlinks=False):
                        if not _is_skipped(name, depth) and depth < DEEPEST_FOLLOWED:
                            folders.append((entry.path, f"{prefix}{name}/", depth + 1))
                    elif entry.is_file(follow_symlinks=False) and not name.startswith(TEMPORARY):
                        found.append((prefix + name, entry.stat(follow_symlinks=False).st_size))
        except OSError:
            continue  # As in `snapshot`.
    found.sort()
    return [{"path": path, "size": size} for path, size in found[:limit]], max(
        0, len(found) - limit
    ) + unseen


class Upload:
    """A pending upload. It has a temporary name in the target folder until `finish`."""

    def __init__(self, root: str, path: str, overwrite: bool) -> None:
        self._path = path
        self._overwrite = overwrite
        self._size = 0
        self._file = -1
        self._folder, self._name = _open_parent(root, path, create=True)
        self._temporary = TEMPORARY + os.urandom(8).hex()
        try:
            self._check_place()
            with refusals(path):
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                self._file = os.open(self._temporary, flags, 0o600, dir_fd=self._folder)
        except BaseException:
            self.abandon()
            raise

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        with refusals(self._path):
            while view:
                written = os.write(self._file, view)
                self._size += written
                view = view[written:]

    def finish(self) -> tuple[int, bool]:
        """Moves the file to its final name. Returns its size and whether it replaced a file."""
        try:
            with refusals(self._path):
                os.fchmod(self._file, 0o644)
                os.close(self._file)
                self._file = -1
                replaced = self._check_place()
                if self._overwrite:
                    os.rename(
                        self._temporary,
                        self._name,
                        src_dir_fd=self._folder,
                        dst_dir_fd=self._folder,
                    )
                else:
                    # Unlike rename, link fails if the file was created since the check.
                    os.link(
                        self._temporary,
                        self._name,
                        src_dir_fd=self._folder,
                        dst_dir_fd=self._folder,
                    )
            return self._size, replaced
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Removes the temporary file. May be called after `finish`, and repeatedly."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._folder >= 0:
            try:
                os.unlink(self._temporary, dir_fd=self._folder)
            except OSError:
                pass
            os.close(self._folder)
            self._folder = -1

    def _check_place(self) -> bool:
        """Returns whether the file already exists. Raises FileRefused if it may not be replaced."""
        try:
            status = os.lstat(self._name, dir_fd=self._folder)
        except FileNotFoundError:
            return False
        except OSError as cause:
            raise _refusal(self._path, cause) from cause
        if not stat.S_ISREG(status.st_mode):
            raise FileRefused("not_a_file", f"{self._path} is not a regular file")
        if not self._overwrite:
            raise FileRefused("exists", f"{self._path} exists already")
        return True


def snapshot(root: str) -> FolderState | None:
    """Returns the state of all files below `root`, or None if there are too many to track."""
    found: FolderState = {}
    entries_left = MAX_FOLLOWED
    folders = [(root, "", 0)]
    while folders:
        folder, prefix, depth = folders.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    entries_left -= 1
                    if entries_left < 0:
                        return None
                    name = entry.name
                    if entry.is_dir(follow_symlinks=False):
                        if depth >= DEEPEST_FOLLOWED:
                            return None
                        if not _is_skipped(name, depth):
                            folders.append((entry.path, f"{prefix}{name}/", depth + 1))
                    elif entry.is_file(follow_symlinks=False) and not name.startswith(TEMPORARY):
                        status = entry.stat(follow_symlinks=False)
                        found[prefix + name] = (status.st_size, status.st_mtime_ns, status.st_ino)
        except OSError:
            # Removed or made inaccessible meanwhile: invisible entries are not reported.
            continue
    return found


def _is_skipped(folder: str, depth: int) -> bool:
    """Reports whether a folder is skipped in listings of the user's files."""
    # Modules generated by the host are not output of a cell, and may be more files than can be
    # tracked.
    is_generated = depth == 0 and folder == "mcptools"
    return is_generated or folder.startswith(".") or folder == "__pycache__"


def report(before: FolderState | None, after: FolderState | None) -> dict[str, Any] | None:
    """Returns the `files` member of a `done` frame."""
    if before is None or after is None:
        return None
    if before == after:
        return {"created": [], "changed": [], "deleted": [], "omitted": 0}
    created = sorted(path for path in after if path not in before)
    changed = sorted(
        path for path, state in after.items() if path in before and before[path] != state
    )
    deleted = sorted(path for path in before if path not in after)
    return {
        "created": [{"path": path, "size": after[path][0]} for path in created[:MAX_ENTRIES]],
        "changed": [{"path": path, "size": after[path][0]} for path in changed[:MAX_ENTRIES]],
        "deleted": deleted[:MAX_ENTRIES],
        "omitted": sum(max(0, len(paths) - MAX_ENTRIES) for paths in (created, changed, deleted)),
    }


def _open_file(root: str, path: str) -> tuple[int, os.stat_result]:
    """Opens a regular file for reading. Returns its descriptor and its status."""
    folder, name = _open_parent(root, path, create=False)
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for a writer.
        with refusals(path):
            file = os.open(
                name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder
            )
    finally:
        os.close(folder)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        os.close(file)
        raise FileRefused("not_a_file", f"{path} is not a regular file")
    return file, status


def _version(status: os.stat_result) -> str:
    """Returns a text that changes when the file changes. Two changes within one clock tick count as
    one.
    """
    return f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"


def _open_parent(root: str, path: str, create: bool) -> tuple[int, str]:
    """Opens the folder of the file that `path` names. Returns its descriptor and the last component
    of the path.
    """
    parts = _parts(path)
    with refusals(path):
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            inner = open_folder(folder, part, path, create)
            os.close(folder)
            folder = inner
    except BaseException:
        os.close(folder)
        raise
    return folder, parts[-1]


def open_folder(parent: int, name: str, path: str, create: bool) -> int:
    if create:
        try:
            os.mkdir(name, 0o755, dir_fd=parent)
        except FileExistsError:
            pass
        except OSError as cause:
            raise _refusal(path, cause) from cause
    try:
        return os.open(name, FOLDER_FLAGS, dir_fd=parent)
    except OSError as cause:
        if cause.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise _refusal(path, cause) from cause
        try:
            is_link = stat.S_ISLNK(os.lstat(name, dir_fd=parent).st_mode)
        except OSError:
            is_link = False
        if is_link:
            raise FileRefused(
                "outside", f"{path} passes through a link; links are not followed"
            ) from cause
        raise FileRefused(
            "not_a_file" if create else "missing", f"{name} in {path} is not a folder"
        ) from cause


def _parts(path: str) -> list[str]:
    if not isinstance(path, str) or "\0" in path:
        raise FileRefused("other", "the path is not a path")
    if path.startswith("/"):
        raise FileRefused("outside", f"{path} is not relative to the working folder")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise FileRefused("outside", f"{path} leaves the working folder")
    if not parts or path.endswith(("/", "/.")):
        raise FileRefused("not_a_file", f"{path!r} names a folder, not a file")
    return parts


@contextlib.contextmanager
def refusals(path: str) -> Iterator[None]:
    """Turns an OSError inside the block into a FileRefused that names the path."""
    try:
        yield
    except OSError as cause:
        raise _refusal(path, cause) from cause


def _refusal(path: str, cause: OSError) -> FileRefused:
    reason = _REASONS.get(cause.errno or 0, "other")
    return FileRefused(reason, f"{path}: {os.strerror(cause.errno or 0).lower()}")
