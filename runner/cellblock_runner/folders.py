"""Folders: saves the content of the session's folders in memory, and restores it.

A copy of a session needs the files as they were when it was made, perhaps minutes later, when they
have changed (undo) or in a sandbox where there are none (fork). So their content is kept in this
process's memory, which every copy shares until it is written to. Only changes since the last time
are read. Large files of a session that is about to be forked are not read but mapped.

Regular files, folders and symbolic links are kept, with their modes and times; hard links become
separate files. A mount below a folder does not belong to it, and is never entered, saved or
removed.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection
from typing import NamedTuple, Union

from . import mappings
from .descriptors import Identity, content_of, write_all

# Limits on the entries that are kept for undo, and for a fork.
MAX_KEPT = 10_000
MAX_CARRIED = 100_000

# Files up to this size are read for a fork, larger ones mapped: a mapping costs at least two system
# calls and a page fault.
_SMALL_FILE = 64 * 1024
# A file modified less than this many nanoseconds before it was read may have changed again with the
# same timestamp. Kernels update timestamps in steps of up to 10 ms.
_TIMESTAMP_STEP = 20_000_000

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PERMISSIONS = 0o1777  # Without setuid and setgid, which a session may not set.

Content = Union[bytes, str, mappings.FileView, None]


class Node(NamedTuple):
    """One file, folder or link."""

    kind: int
    mode: int
    modified: int
    # Distinguishes one state of the node from another.
    signature: tuple[int, int, int, int]
    # False if the state may change without a new signature.
    settled: bool = True
    # The bytes of a file or the target of a link.
    content: Content = None


# Maps a path below the folder to its node. Parents come before their children.
Tree = dict[str, Node]


class SnapshotError(Exception):
    """The folder cannot be kept as a whole, and is not kept at all. The message is for the user."""


def snapshot(root: str, previous: Tree | None, budget: int, mapped: Collection[Identity]) -> Tree:
    """Returns the tree below `root`, with the content of all files. Raises SnapshotError if that is
    more than `budget` bytes.

    `previous` is the tree kept the last time. `mapped` lists files that are mapped as memory, which
    change without a new timestamp.
    """
    tree = _walk(root, MAX_KEPT, is_strict=True)
    size = sum(node.signature[1] for node in tree.values() if node.kind == stat.S_IFREG)
    if size > budget:
        raise SnapshotError(
            f"the work folder holds {_mebibytes(size)}, and {_mebibytes(budget)} are kept for undo"
        )
    previous = previous or {}
    now = time.time_ns()
    for path, node in tree.items():
        before = previous.get(path)
        if before is not None and before.signature == node.signature and before.settled:
            tree[path] = before
        elif node.kind == stat.S_IFREG:
            tree[path] = _read(f"{root}/{path}", node, now, mapped)
        elif node.kind == stat.S_IFLNK:
            tree[path] = _read_link(f"{root}/{path}", node)
    return tree


def snapshot_for_fork(root: str, kept: Tree | None) -> Tree:
    """Returns the tree below `root` for a fork that happens soon: small files are read, large ones
    mapped. Nodes of `kept` that have not changed are reused.
    """
    tree = _walk(root, MAX_CARRIED, is_strict=False)
    for path, node in tree.items():
        known = kept.get(path) if kept else None
        if known is not None and known.signature == node.signature:
            tree[path] = known
        elif node.kind == stat.S_IFREG:
            tree[path] = _read_or_map(f"{root}/{path}", node)
        elif node.kind == stat.S_IFLNK:
            tree[path] = _read_link(f"{root}/{path}", node)
    return tree


def is_unused(root: str, home: str) -> bool:
    """Reports whether `root` contains nothing, or only the home folder, and that is empty."""
    try:
        return all(f"{root}/{path}" == home for path in _walk(root, 1, is_strict=True))
    except (SnapshotError, OSError):
        return False


def is_mapped(tree: Tree) -> bool:
    """Reports whether `snapshot_for_fork` mapped files of it."""
    return any(isinstance(node.content, mappings.FileView) for node in tree.values())


def release(tree: Tree) -> None:
    """Unmaps the files that `snapshot_for_fork` mapped."""
    for node in tree.values():
        if isinstance(node.content, mappings.FileView):
            mappings.unmap(node.content)


def restore(root: str, tree: Tree, removing: bool) -> tuple[Tree, int]:
    """Makes the content of the folder match the tree, and removes all other entries if `removing`.
    Changes only entries that differ.

    An existing file keeps its inode. Returns the current tree, and the number of entries that could
    not be restored.
    """
    # Without a limit: otherwise a folder that a cell has filled beyond it could not be undone.
    present = _walk(root, None, is_strict=False)
    failures = _remove_new(root, tree, present) if removing else 0
    now: Tree = {}
    touched = []
    for path, node in tree.items():
        existing = present.get(path)
        if (
            existing is not None
            and existing.kind == node.kind
            and existing.signature == node.signature
            and node.settled
        ):
            now[path] = node
            continue
        if existing is None and node.kind == stat.S_IFSOCK:
            continue  # The endpoint of a connection that is not copied either.
        try:
            _restore_node(
                f"{root}/{path}",
                node,
                existing if existing is not None and existing.kind == node.kind else None,
            )
        except OSError:
            failures += 1
        else:
            now[path] = node
            touched.append(path)
    # Children before parents: the work above has changed the times of folders, and the mode of a
    # folder may exclude its owner.
    for path in reversed([path for path, node in now.items() if node.kind == stat.S_IFDIR]):
        try:
            _restore_attributes(f"{root}/{path}", now[path])
        except OSError:
            failures += 1
    for path in touched:
        try:
            now[path] = now[path]._replace(
                signature=_signature(os.lstat(f"{root}/{path}")), settled=False
            )
        except OSError:
            del now[path]
    return now, failures


def _walk(root: str, most: int | None, is_strict: bool) -> Tree:
    """Returns the tree below `root`, parents first. Raises SnapshotError if it has more than `most`
    entries.

    If strict, also raises SnapshotError when an entry cannot be read: undo would treat it as new,
    and remove it.
    """
    tree: Tree = {}
    device = os.lstat(root).st_dev
    pending = [""]
    for prefix in pending:
        try:
            with os.scandir(f"{root}/{prefix}") as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if status.st_dev != device:
                        continue
                    path = prefix + entry.name
                    mode = status.st_mode
                    kind = stat.S_IFMT(mode)
                    tree[path] = Node(
                        kind,
                        mode & _PERMISSIONS,
                        status.st_mtime_ns,
                        (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns),
                    )
                    if kind == stat.S_IFDIR:
                        pending.append(path + "/")
        except FileNotFoundError:
            continue  # Removed during the walk.
        except PermissionError as cause:
            if is_strict:
                raise SnapshotError(f"the folder {prefix.rstrip('/')} cannot be read") from cause
            continue
        if most is not None and len(tree) > most:
            raise SnapshotError(f"the work folder holds more than {most:,} entries")
    return tree


def _read(path: str, node: Node, now: int, mapped: Collection[Identity]) -> Node:
    try:
        number = os.open(path, _READ_FLAGS)
    except OSError:
        return node  # Without content: it can be recognized, but not restored.
    try:
        status = os.fstat(number)
        content = content_of(number, status.st_size)
    except OSError:
        return node
    finally:
        os.close(number)
    changed = max(status.st_mtime_ns, status.st_ctime_ns)
    settled = now - changed > _TIMESTAMP_STEP and (status.st_dev, status.st_ino) not in mapped
    return node._replace(signature=_signature(status), content=content, settled=settled)


def _read_or_map(path: str, node: Node) -> Node:
    if node.signature[1] <= _SMALL_FILE:
        return _read(path, node, 0, ())
    try:
        number = os.open(path, _READ_FLAGS)
    except OSError:
        return node
    try:
        return node._replace(content=mappings.map_file(number, os.fstat(number).st_size))
    except OSError:
        return node
    finally:
        os.close(number)


def _read_link(path: str, node: Node) -> Node:
    try:
        return node._replace(content=os.readlink(path))
    except OSError:
        return node


def _remove_new(root: str, tree: Tree, present: Tree) -> int:
    """Removes entries that are not in the tree, children first. Returns the number of failures."""
    failures = 0
    for path in reversed(list(present)):
        node, wanted = present[path], tree.get(path)
        if wanted is not None and wanted.kind == node.kind:
            continue
        full = f"{root}/{path}"
        try:
            _make_accessible(os.path.dirname(full))
            if node.kind == stat.S_IFDIR:
                os.rmdir(full)
            else:
                os.unlink(full)
        except OSError:
            failures += 1
    return failures


def _restore_node(path: str, node: Node, existing: Node | None) -> None:
    if existing is None:
        _make_accessible(os.path.dirname(path))
    if node.kind == stat.S_IFDIR:
        if existing is None:
            try:
                os.mkdir(path, 0o700)
            except FileExistsError:
                pass  # For example the home folder of a new sandbox.
    elif node.kind == stat.S_IFLNK:
        if existing is not None:
            if os.readlink(path) == node.content:
                return
            os.unlink(path)
        if not isinstance(node.content, str):
            raise OSError("the link's target is unknown")
        os.symlink(node.content, path)
        os.utime(path, ns=(node.modified, node.modified), follow_symlinks=False)
    elif node.kind == stat.S_IFREG:
        _restore_file(path, node, existing)
    elif node.kind == stat.S_IFIFO and existing is None:
        os.mkfifo(path, node.mode)


def _restore_file(path: str, node: Node, existing: Node | None) -> None:
    content = node.content.bytes() if isinstance(node.content, mappings.FileView) else node.content
    if not isinstance(content, (bytes, memoryview)):
        raise OSError("the file's content is unknown")
    if existing is not None and existing.mode & 0o600 != 0o600:
        os.chmod(path, 0o600)
    number = os.open(
        path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600
    )
    try:
        if (
            existing is None
            or existing.signature[1] != len(content)
            or content_of(number, len(content)) != content
        ):
            write_all(number, content)
            os.ftruncate(number, len(content))
        os.fchmod(number, node.mode)
        os.utime(number, ns=(node.modified, node.modified))
    finally:
        os.close(number)


def _restore_attributes(path: str, node: Node) -> None:
    status = os.lstat(path)
    if status.st_mode & _PERMISSIONS != node.mode:
        os.chmod(path, node.mode)
    if status.st_mtime_ns != node.modified:
        os.utime(path, ns=(node.modified, node.modified))


def _make_accessible(folder: str) -> None:
    """Makes a folder that we own accessible to us."""
    mode = os.lstat(folder).st_mode & _PERMISSIONS
    if mode & 0o700 != 0o700:
        os.chmod(folder, mode | 0o700)


def _signature(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _mebibytes(size: int) -> str:
    return f"{size / (1024 * 1024):,.1f} MiB"
