"""Import cache: the modules imported at warm-up, in one file for all containers of an image.

Warming up imports two hundred modules, for each of which Python searches several folders, and
compiles eighty regular expressions. All of that is the same in every container of an image. So the
process that fills the runner's volume does it once and writes the result to a file (`main`): the
code of the modules, and the compiled expressions. A process that warms up uses the file while it
imports (`offer`), and stops using it before a session begins (`withdraw`).

Nothing of it is visible afterwards. A module has its usual specification, loader and file, because
the cache only supplies the code that this loader would have read; an expression is in the cache of
`re`, where compiling it would have put it. The finder is removed, so imports in a session work as
usual.

A cache belongs to one Python and its search path, and its checksum covers both: any other cache,
and a damaged one, is ignored, and everything is imported as usual. Sessions cannot write to it. Its
content comes only from the image and the runner.
"""

from __future__ import annotations

import _imp
import _sre
import marshal
import mmap
import os
import sys
from _frozen_importlib_external import MAGIC_NUMBER, SourceFileLoader, spec_from_file_location

PATH = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "import_cache")

# File format: a checksum, the size of the index, the index, and the code of one module after
# another.
_CHECKSUM_SIZE, _INDEX_SIZE = 8, 8

# Determines whether a cache fits. Taken at the start of this process, because some modules change
# the path.
_FITS = repr(
    (sys.version, sys.implementation.cache_tag, MAGIC_NUMBER, sys.flags.optimize, sys.path)
).encode()

# Number of modules of this process that came from the cache.
taken = 0
_offered: CacheFinder | None = None


class CacheFinder:
    """Finds modules by their names, before any file search. It is its own loader until a module is
    executed.
    """

    def __init__(self, modules: dict[str, tuple[str, bool, int, int]], codes: memoryview) -> None:
        self._modules, self._codes = modules, codes

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> object:
        found = self._modules.get(name)
        if found is None:
            return None
        origin, is_package, _, _ = found
        folders = [os.path.dirname(origin)] if is_package else None
        return spec_from_file_location(
            name, origin, loader=self, submodule_search_locations=folders
        )

    def create_module(self, _spec: object) -> None:
        """Uses Python's default."""

    def exec_module(self, module: object) -> None:
        global taken
        spec = module.__spec__
        _, _, start, end = self._modules[spec.name]
        spec.loader = module.__loader__ = SourceFileLoader(spec.name, spec.origin)
        taken += 1
        exec(marshal.loads(self._codes[start:end]), module.__dict__)


def offer(path: str = PATH) -> None:
    """Makes modules and expressions come from the cache from now on, if one fits."""
    global _offered
    contents = None if _offered is not None else _contents(path)
    if contents is None:
        return
    modules, expressions, codes = contents
    _offered = CacheFinder(modules, codes)
    sys.meta_path.insert(0, _offered)
    import re  # Comes from the cache.

    for pattern, flags, words in expressions:
        re._cache.setdefault((type(pattern), pattern, flags), _sre.compile(*words))


def withdraw() -> None:
    """Stops using the cache: from now on, modules are found as usual."""
    global _offered
    if _offered is not None:
        sys.meta_path.remove(_offered)
        _offered = None


def write(path: str, known: set[str]) -> None:
    """Writes the modules that this process has imported, except those that were `known`. The file
    is written atomically.
    """
    modules, codes, size = {}, [], 0
    for name, module in list(sys.modules.items()):
        code = None if name in known else _code(name, module)
        if code is not None:
            data = marshal.dumps(code)
            spec = module.__spec__
            modules[name] = (
                spec.origin,
                spec.submodule_search_locations is not None,
                size,
                size + len(data),
            )
            codes.append(data)
            size += len(data)
    contents = marshal.dumps((modules, _expressions()))
    data = b"".join((len(contents).to_bytes(_INDEX_SIZE, "little"), contents, *codes))
    new = f"{path}.{os.urandom(8).hex()}"
    with open(new, "xb") as file:
        try:
            file.write(_checksum(data) + data)
            file.flush()
            os.fsync(file.fileno())
            os.rename(new, path)
        except OSError:
            os.unlink(new)
            raise


def main() -> None:
    """Warms up like a container in quick mode, and writes the imported modules to the cache."""
    known = set(sys.modules)
    from . import bootstrap, forkserver, supervisor  # noqa: F401 - used by the first process

    forkserver.warm_up({"environment": {}, "preload": [], "rehearse": False})
    write(PATH, known)


def _contents(
    path: str,
) -> (
    tuple[
        dict[str, tuple[str, bool, int, int]],
        list[tuple[object, int, tuple[object, ...]]],
        memoryview,
    ]
    | None
):
    """Returns the content of a cache: modules, expressions, and the code that the modules point
    into. Returns None if it is not for this process.
    """
    try:
        with open(path, "rb", 0) as file:
            # Reading it would cost memory, and as much time as it saves.
            data = memoryview(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ))
    except (OSError, ValueError):
        return None  # The file is missing or empty.
    if data[:_CHECKSUM_SIZE] != _checksum(data[_CHECKSUM_SIZE:]):
        return None
    begin = _CHECKSUM_SIZE + _INDEX_SIZE
    end = begin + int.from_bytes(data[_CHECKSUM_SIZE:begin], "little")
    modules, expressions = marshal.loads(data[begin:end])
    return modules, expressions, data[end:]


def _checksum(data: bytes | memoryview) -> bytes:
    """Returns a checksum of the data and of everything that determines whether it fits."""
    return _imp.source_hash(int.from_bytes(_imp.source_hash(0, _FITS), "little", signed=True), data)


def _code(name: str, module: object) -> object:
    """Returns the code of a module that was read from an ordinary file, or None."""
    spec = getattr(module, "__spec__", None)
    loader = getattr(spec, "loader", None)
    # A lazy module whose code has not run was not needed.
    if type(module) is not type(sys) or type(loader) is not SourceFileLoader or spec.name != name:
        return None
    is_plain = module.__loader__ is loader and loader.name == name and loader.path == spec.origin
    return loader.get_code(name) if is_plain else None


def _expressions() -> list[tuple[object, int, tuple[object, ...]]]:
    """Returns the content of the `re` cache: each pattern with its flags, and the arguments of
    `_sre.compile` for it.
    """
    import re

    compiler = sys.modules["re._compiler" if sys.version_info >= (3, 11) else "sre_compile"]
    found = []

    class Recorder:
        """Replaces the `_sre` module, and records the arguments of `compile`."""

        def __getattr__(self, name: str) -> object:
            return getattr(_sre, name)

        def compile(self, pattern: object, flags: int, code: list[int], *groups: object) -> None:
            # Enum members cannot be marshalled.
            found[-1] = (*found[-1], (pattern, int(flags), [int(word) for word in code], *groups))

    compiler._sre = Recorder()
    try:
        for _, pattern, flags in list(re._cache):
            found.append((pattern, int(flags)))
            compiler.compile(pattern, flags)
    finally:
        compiler._sre = _sre
    return found
