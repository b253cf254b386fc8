"""Stock: what warming up imports, in one file for all containers of an image.

Becoming warm takes two hundred modules, for each of which Python looks into several folders, and eighty regular expressions, which it compiles.
All of that comes out the same in every container of an image. So whoever fills the runner's volume does it once more and writes it down (`main`):
the code of the modules, and the instructions of the expressions. A process that becomes warm has it within reach while it imports (`offer`), and
puts it away before a session begins (`withdraw`).

Nothing of it can be noticed afterwards. A module has the specification, the loader and the file that it always has, because the stock only brings
the code that this loader would have read; an expression is in the cache of `re`, where compiling it would have put it. The finder is gone, so what a
session imports is found as always.

A stock belongs to one Python and its search path, and is sealed with both: any other one, and a damaged one, is no stock, and everything is imported as
usual. Sessions cannot write to it. Nobody but the image and the runner has written what is in it.
"""

from __future__ import annotations

import _imp
import _sre
import marshal
import mmap
import os
import sys
from _frozen_importlib_external import MAGIC_NUMBER, SourceFileLoader, spec_from_file_location

PLACE = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "stock")

# A seal, the size of the list of contents, that list, and the code of one module after another.
_SEAL, _SIZE = 8, 8

# What decides whether a stock fits, as this process began: some modules change the path.
_FITS = repr((sys.version, sys.implementation.cache_tag, MAGIC_NUMBER, sys.flags.optimize, sys.path)).encode()

# How many modules of this process have come from a stock.
taken = 0
_offered: Stock | None = None


class Stock:
    """Finds modules by their names, before anybody looks for files. It is its own loader, until a module is there."""

    def __init__(self, modules: dict[str, tuple[str, bool, int, int]], codes: memoryview) -> None:
        self._modules, self._codes = modules, codes

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> object:
        found = self._modules.get(name)
        if found is None:
            return None
        origin, is_package, _, _ = found
        folders = [os.path.dirname(origin)] if is_package else None
        return spec_from_file_location(name, origin, loader=self, submodule_search_locations=folders)

    def create_module(self, _spec: object) -> None:
        """Leaves it to Python."""

    def exec_module(self, module: object) -> None:
        global taken
        spec = module.__spec__
        _, _, start, end = self._modules[spec.name]
        spec.loader = module.__loader__ = SourceFileLoader(spec.name, spec.origin)
        taken += 1
        exec(marshal.loads(self._codes[start:end]), module.__dict__)


def offer(place: str = PLACE) -> None:
    """Has modules and expressions come from the stock from now on, if there is one that fits."""
    global _offered
    contents = None if _offered is not None else _contents(place)
    if contents is None:
        return
    modules, expressions, codes = contents
    _offered = Stock(modules, codes)
    sys.meta_path.insert(0, _offered)
    import re  # Comes from the stock.

    for pattern, flags, words in expressions:
        re._cache.setdefault((type(pattern), pattern, flags), _sre.compile(*words))


def withdraw() -> None:
    """Puts the stock away: from now on, modules are found as always."""
    global _offered
    if _offered is not None:
        sys.meta_path.remove(_offered)
        _offered = None


def lay_in(place: str, known: set[str]) -> None:
    """Writes down what this process has imported beside the modules that were `known`. The file is there as a whole, or not at all."""
    modules, codes, size = {}, [], 0
    for name, module in list(sys.modules.items()):
        code = None if name in known else _code(name, module)
        if code is not None:
            data = marshal.dumps(code)
            spec = module.__spec__
            modules[name] = (spec.origin, spec.submodule_search_locations is not None, size, size + len(data))
            codes.append(data)
            size += len(data)
    contents = marshal.dumps((modules, _expressions()))
    data = b"".join((len(contents).to_bytes(_SIZE, "little"), contents, *codes))
    new = f"{place}.{os.urandom(8).hex()}"
    with open(new, "xb") as file:
        try:
            file.write(_seal(data) + data)
            file.flush()
            os.fsync(file.fileno())
            os.rename(new, place)
        except OSError:
            os.unlink(new)
            raise


def main() -> None:
    """Becomes warm as a container does that is in a hurry, and writes down what that took."""
    known = set(sys.modules)
    from . import family, first, supervisor  # noqa: F401 - the first process takes these

    family.warm_up({"environment": {}, "preload": [], "rehearse": False})
    lay_in(PLACE, known)


def _contents(place: str) -> tuple[dict[str, tuple[str, bool, int, int]], list[tuple[object, int, tuple[object, ...]]], memoryview] | None:
    """Returns what is in a stock: modules, expressions, and the code that the modules point into. None if it is not for this process."""
    try:
        with open(place, "rb", 0) as file:
            # Reading it would cost memory, and as much time as it saves.
            data = memoryview(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ))
    except (OSError, ValueError):
        return None  # There is none, or an empty one.
    if data[:_SEAL] != _seal(data[_SEAL:]):
        return None
    begin = _SEAL + _SIZE
    end = begin + int.from_bytes(data[_SEAL:begin], "little")
    modules, expressions = marshal.loads(data[begin:end])
    return modules, expressions, data[end:]


def _seal(data: bytes | memoryview) -> bytes:
    """Returns a sum over data and everything about this process that decides whether it fits."""
    return _imp.source_hash(int.from_bytes(_imp.source_hash(0, _FITS), "little", signed=True), data)


def _code(name: str, module: object) -> object:
    """Returns the code of a module that was read from an ordinary file. None for all others."""
    spec = getattr(module, "__spec__", None)
    loader = getattr(spec, "loader", None)
    # One whose own code has not run is not among those that were needed.
    if type(module) is not type(sys) or type(loader) is not SourceFileLoader or spec.name != name:
        return None
    is_plain = module.__loader__ is loader and loader.name == name and loader.path == spec.origin
    return loader.get_code(name) if is_plain else None


def _expressions() -> list[tuple[object, int, tuple[object, ...]]]:
    """Returns what is in the cache of `re`: each pattern with its flags, and what the machine of expressions is given for it."""
    import re

    compiler = sys.modules["re._compiler" if sys.version_info >= (3, 11) else "sre_compile"]
    found = []

    class Listener:
        """Stands in the machine's place, and hears what it is given."""

        def __getattr__(self, name: str) -> object:
            return getattr(_sre, name)

        def compile(self, pattern: object, flags: int, code: list[int], *groups: object) -> None:
            # Numbers that have names cannot be written down.
            found[-1] = (*found[-1], (pattern, int(flags), [int(word) for word in code], *groups))

    compiler._sre = Listener()
    try:
        for _, pattern, flags in list(re._cache):
            found.append((pattern, int(flags)))
            compiler.compile(pattern, flags)
    finally:
        compiler._sre = _sre
    return found
