"""The import cache: modules and expressions from it are the same as others, and a cache that does
not fit is ignored.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

from .harness import RUNNER

# Becomes warm, with the cache at a path if it fits, and prints what an expression gives then.
_WARM = """
import gc, json, sys
from cellblock_runner import import_cache
import_cache.offer(sys.argv[1])
from cellblock_runner import forkserver
offered, import_cache.offer = import_cache.offer, lambda: None
forkserver.warm_up({"environment": {}, "preload": [], "rehearse": False})
import_cache.offer = offered
{more}
"""

_WRITE = """
import sys
known = set(sys.modules)
from cellblock_runner import forkserver, import_cache
forkserver.warm_up({"environment": {}, "preload": [], "rehearse": False})
import_cache.write(sys.argv[1], known)
"""

# Everything that tells where a module comes from. `import_cache` itself counts, and only the
# interpreter's own state may differ beside that.
_MODULES = """
def told(spec):
    if spec is None: return None
    loader = spec.loader
    place = None
    if loader:
        name, path = getattr(loader, "name", None), getattr(loader, "path", None)
        place = (type(loader).__name__, name, path)
    folders = spec.submodule_search_locations
    return [spec.name, place, spec.origin, spec.cached, spec.parent, spec.has_location,
            spec.loader_state, None if folders is None else list(folders),
            getattr(spec, "_initializing", None)]
def told_of(module):
    loader = getattr(module, "__loader__", None)
    names = ("__name__", "__file__", "__cached__", "__package__", "__doc__")
    places = [getattr(module, name, None) for name in names]
    is_its_own = loader is getattr(getattr(module, "__spec__", None), "loader", None)
    folders, spec = list(getattr(module, "__path__", [])), told(getattr(module, "__spec__", None))
    return [type(module).__name__, places, folders, spec, is_its_own, sorted(vars(module))]
# A module that only the reading of a cache needs.
told_modules = {
    name: told_of(module)
    for name, module in sorted(sys.modules.items())
    if name not in ("mmap", "gc", "__main__")
}
finders = [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path]
found = {"taken": import_cache.taken, "finders": finders, "path": sys.path, **told_modules}
print(json.dumps(found, default=repr))
"""

_USES = """
import importlib, importlib.resources, inspect, linecache, pickle, traceback
import IPython, IPython.core.interactiveshell as interactive
def failure(work):
    try: work()
    except Exception: return traceback.format_exc()
import textwrap, threading
before = textwrap
found = {
    "traceback": failure(lambda: json.loads("{")),
    "traceback of IPython": failure(
        lambda: interactive.InteractiveShell.run_line_magic(None, "x", "")
    ),
    "source": inspect.getsource(interactive.InteractiveShell.run_cell),
    "file": inspect.getsourcefile(json.decoder.JSONDecoder),
    "line": linecache.getline(textwrap.__file__, 1, vars(textwrap)),
    "text": textwrap.__loader__.get_source("textwrap")[:100],
    "resources": sorted(entry.name for entry in importlib.resources.files("IPython").iterdir())[:5],
    "reloaded": importlib.reload(textwrap) is before and textwrap.dedent(" x"),
    "pickled": pickle.loads(pickle.dumps(json.JSONDecodeError("a", "b", 0))).msg,
    "pickled function": pickle.loads(pickle.dumps(textwrap.dedent)) is textwrap.dedent,
    "found": type(importlib.util.find_spec("textwrap").loader).__name__,
    "code": json.JSONDecoder.decode.__code__.co_filename,
}
print(json.dumps({"taken": import_cache.taken, **found}))
"""

_EXPRESSIONS = """
import re
compiler = sys.modules.get("re._compiler") or sys.modules["sre_compile"]
def facts(expression):
    return expression.flags, expression.groups, expression.groupindex
unequal = [pattern for (_, pattern, flags), kept in re._cache.items()
           if (fresh := compiler.compile(pattern, flags)) != kept or facts(fresh) != facts(kept)]
every = sorted(repr(key) for key in re._cache)
print(json.dumps({"taken": import_cache.taken, "unequal": unequal, "all": every}))
"""


def _python(code: str, place: str, path: str = str(RUNNER)) -> str:
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, place], env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise AssertionError(done.stderr)
    return done.stdout


class Cached(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        cls.place = str(cls.folder / "cache")
        _python(_WRITE, cls.place)

    def told(self, more: str, place: str | None = None, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            _python(_WARM.replace("{more}", more), place or self.place, **options)
        )
        return found

    def both(self, more: str) -> dict[str, Any]:
        """Checks that something is the same with and without a cache, and returns it."""
        cached, plain = self.told(more), self.told(more, "/nowhere")
        self.assertGreater(cached.pop("taken"), 100)
        self.assertEqual(plain.pop("taken"), 0)  # control
        self.assertEqual(list(cached), list(plain))
        for name, found in plain.items():
            self.assertEqual(cached[name], found, name)
        return plain

    def test_the_same_modules_are_there_and_each_is_what_it_always_is(self) -> None:
        self.assertIn("IPython.core.interactiveshell", self.both(_MODULES))

    def test_tracebacks_sources_and_files_are_the_same(self) -> None:
        found = self.both(_USES)
        self.assertIn("def run_cell", found["source"])
        self.assertIn("JSONDecodeError", found["traceback"])

    def test_expressions_are_those_that_are_compiled(self) -> None:
        found = self.both(_EXPRESSIONS)
        self.assertEqual(found["unequal"], [])
        self.assertGreater(len(found["all"]), 20)

    def test_what_is_imported_later_is_found_as_always(self) -> None:
        # A file of the user's goes before the module that was in the cache, once that has to be
        # found again.
        (self.folder / "textwrap.py").write_text("mine = True")
        code = "sys.path.insert(0, sys.argv[1].rpartition('/')[0]); del sys.modules['textwrap']; "
        code += "import textwrap; print(json.dumps(textwrap.mine))"
        self.addCleanup((self.folder / "textwrap.py").unlink)
        self.assertIs(self.told(code), True)

    def test_a_damaged_cache_is_ignored(self) -> None:
        whole = Path(self.place).read_bytes()
        count = "print(json.dumps(import_cache.taken))"
        self.assertGreater(self.told(count), 100)  # control
        spoilt = {
            "empty": b"",
            "short": whole[:5],
            "cut": whole[:-1],
            "longer": whole + b"\0",
            "other checksum": bytes([whole[0] ^ 1]) + whole[1:],
            "other contents": whole[:100] + bytes([whole[100] ^ 1]) + whole[101:],
            "other code": whole[:-1000] + bytes([whole[-1000] ^ 1]) + whole[-999:],
            "zeros": bytes(len(whole)),
        }
        for name, data in spoilt.items():
            with self.subTest(name):
                place = self.folder / name
                place.write_bytes(data)
                self.assertEqual(self.told(count, str(place)), 0)

    def test_the_cache_of_another_python_or_path_is_ignored(self) -> None:
        count = "print(json.dumps(import_cache.taken))"
        self.assertEqual(self.told(count, path=f"{RUNNER}:/elsewhere"), 0)
        other = str(self.folder / "other")
        _python(_WRITE.replace("known =", "sys.version += 'x'; known =", 1), other)
        self.assertEqual(self.told(count, other), 0)

    def test_a_cache_that_cannot_be_written_leaves_nothing_behind(self) -> None:
        place = self.folder / "taken"
        place.mkdir()
        with self.assertRaisesRegex(AssertionError, "IsADirectoryError"):
            _python(_WRITE, str(place))
        self.assertEqual(
            [entry.name for entry in self.folder.iterdir() if entry.name.startswith("taken")],
            ["taken"],
        )


if __name__ == "__main__":
    unittest.main()
