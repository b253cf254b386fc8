"""Makes a small package index below the folder that is its argument: one folder per project,
holding wheels and source archives.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import sys
import tarfile
import zipfile

ROOT = sys.argv[1]

BACKEND = '''
"""A build backend: packs the modules of the current folder into a wheel. It leaves a sign that it
ran."""
import os, zipfile

def build_wheel(folder, settings=None, metadata=None):
    name, version = open("NAME").read().split()
    description = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": open(f"{name}.py").read(),
        "built_by.txt": f"built in process {os.getpid()}",
        f"{description}/METADATA": f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n",
        f"{description}/WHEEL": "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    files[f"{description}/RECORD"] = "".join(f"{path},,\\n" for path in [*files, f"{description}/RECORD"])
    wheel = f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, wheel), "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel
'''


def wheel(
    name: str, version: str, files: dict[str, str], requires: list[str] = [], points: str = ""
) -> str:
    description = f"{name}-{version}.dist-info"
    files = dict(files)
    needs = "".join(f"Requires-Dist: {need}\n" for need in requires)
    extras = "Provides-Extra: more\n" if "extra ==" in needs else ""
    files[f"{description}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{extras}{needs}"
    )
    files[f"{description}/WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    if points:
        files[f"{description}/entry_points.txt"] = points
    rows = [f"{path},sha256={digest(text)},{len(text)}\n" for path, text in files.items()]
    files[f"{description}/RECORD"] = "".join(rows) + f"{description}/RECORD,,\n"
    path = place(name, f"{name}-{version}-py3-none-any.whl")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for inner, text in files.items():
            archive.writestr(inner, text)
    return path


def source(name: str, version: str, files: dict[str, str]) -> None:
    path = place(name, f"{name}-{version}.tar.gz")
    files = {"PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", **files}
    with tarfile.open(path, "w:gz") as archive:
        for inner, text in files.items():
            member = tarfile.TarInfo(f"{name}-{version}/{inner}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))


def place(name: str, file: str) -> str:
    folder = os.path.join(ROOT, name.replace("_", "-"))
    os.makedirs(folder, exist_ok=True)
    return os.path.join(folder, file)


def digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


wheel("pure", "1.0", {"pure/__init__.py": "value = 1\n", "pure/data/table.txt": "data\n"})
wheel("pure", "2.0", {"pure/__init__.py": "value = 2\n"})
wheel("leaf", "0.1", {"leaf.py": "name = 'leaf'\n"})
wheel(
    "tool_kit",
    "1.5",
    {"tool_kit.py": "import pure\ndef main():\n    print('tool', pure.value)\n"},
    ["pure>=1", "leaf ; extra == 'more'", "missing ; python_version < '3'"],
    "[console_scripts]\ntool-kit = tool_kit:main\n",
)
wheel("ipython", "0.0", {"IPython.py": ""})
# A module that profiles block by name.
wheel("requests", "9.0", {"requests/__init__.py": "value = 9\n"})
wheel("modern", "1.0", {"modern.py": ""}, ["pure>=2"])
wheel("modest", "1.0", {"modest.py": ""})
wheel("modest", "2.0", {"modest.py": ""}, ["pure<2"])
wheel("huge", "1.0", {"huge.bin": "x" * (3 << 20)})
wheel("large", "1.0", {"large.bin": "x" * (12 << 20)}, ["larger"])
wheel("larger", "1.0", {"larger.bin": "y" * (12 << 20)})

# Its entry in the index will not be true.
wheel("exchanged", "1.0", {"exchanged.py": ""})
with zipfile.ZipFile(place("broken", "broken-1.0-py3-none-any.whl"), "w") as archive:
    archive.writestr("broken.py", "")
wheel("escaping", "1.0", {"escaping.py": "", "../../escaped.py": "", "../escaped.py": ""})
wheel("startup", "1.0", {"startup.pth": "import os; os.abort()\n", "startup.py": ""})

wheel("small_backend", "1.0", {"small_backend.py": BACKEND})
project = '[build-system]\nrequires = ["small-backend"]\nbuild-backend = "small_backend"\n'
source(
    "from_source",
    "1.0",
    {"pyproject.toml": project, "NAME": "from_source 1.0", "from_source.py": "value = 7\n"},
)
# Its old version has no wheel and nothing against any other package.
source(
    "outgrown",
    "0.1",
    {"pyproject.toml": project, "NAME": "outgrown 0.1", "outgrown.py": "value = 0\n"},
)
wheel("outgrown", "3.0", {"outgrown.py": "value = 3\n"}, ["pure<2"])
failing = {"pyproject.toml": project, "NAME": "", "failing.py": ""}
source("failing", "1.0", failing)
