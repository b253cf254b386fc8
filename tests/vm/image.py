"""Builds the images of `run`: a Debian release in a file system, with its kernel and its initrd
beside it.

The recipe is this file. An image is built again when it changes, or when the code that builds
Python environments does: the guest has no network, so the image holds a finished environment.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

TREE = Path(__file__).resolve().parent.parent.parent
MIRROR = "http://deb.debian.org/debian"
PACKAGES = [
    "linux-image-cloud-amd64",
    "systemd-sysv",
    "dbus-user-session",
    "libpam-systemd",
    "python3-venv",
    "ca-certificates",
    "kmod",
    "udev",
]
# Those of the host, so that a registry behind a proxy of its own can be reached.
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")

# Starts the checks, and the machine ends with them.
SERVICE = """\
[Unit]
Description=Cellblock under test
After=multi-user.target dbus.socket systemd-logind.service
SuccessAction=poweroff-force
FailureAction=poweroff-force
[Service]
Type=oneshot
ExecStart=/usr/bin/python3 -u /payload/guest.py
StandardOutput=file:/dev/ttyS1
StandardError=inherit
[Install]
WantedBy=multi-user.target
"""

# A machine that cannot boot ends instead of waiting for an administrator.
EMERGENCY = """\
[Service]
ExecStart=/usr/bin/systemctl poweroff --force --force
"""


def find_or_build(suite, program):
    """Returns the folder of an image that was made from the present recipe."""
    recipe = hashlib.sha256()
    for path in [Path(__file__), *sorted((TREE / "src/environment").glob("**/*.rs"))]:
        recipe.update(path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cellblock/vm"
    image = cache / f"{suite}-{recipe.hexdigest()[:12]}"
    if image.exists():
        return image
    cache.mkdir(parents=True, exist_ok=True)
    for old in cache.glob(f"{suite}-*"):
        shutil.rmtree(old)
    started = time.monotonic()
    print(f"building the image {suite}", flush=True)
    with tempfile.TemporaryDirectory(prefix=f".{suite}-", dir=cache) as folder:
        folder = Path(folder)
        root, made = folder / "root", folder / "made"
        made.mkdir()
        bootstrap(suite, root, program)
        shutil.copy(next(root.glob("boot/vmlinuz-*")), made / "vmlinuz")
        shutil.copy(next(root.glob("boot/initrd.img-*")), made / "initrd")
        make_file_system(root, made / "root.ext4", spare=512)
        made.rename(image)
    print(f"built in {time.monotonic() - started:.0f} s", flush=True)
    return image


def bootstrap(suite, root, program):
    # An initrd with the few modules that this machine needs boots seconds faster.
    initrd = (
        'mkdir -p "$1/etc/initramfs-tools/conf.d" && echo MODULES=list >"$1/etc/initramfs-tools/conf.d/small"'
        ' && printf "virtio_pci\\nvirtio_blk\\next4\\n" >"$1/etc/initramfs-tools/modules"'
    )
    hooks = [
        f'install -D {CERTIFICATES} "$1{CERTIFICATES}"',
        f'install {program} "$1/tmp/cellblock"',
        # The user of the checks. Its uid is that of an ordinary user, so that logind gives it what
        # ordinary users get.
        'chroot "$1" useradd --uid 1000 --create-home --shell /bin/bash u',
        'HOME=/root chroot "$1" /tmp/cellblock env build minimal',
        'cd "$1" && mkdir -p home/u/.local/share && cp -a root/.local/share/cellblock home/u/.local/share/',
        'chroot "$1" chown -R u:u /home/u && rm "$1/tmp/cellblock"',
        'mkdir "$1/payload" && echo "/dev/vdb /payload ext4 ro,x-systemd.device-timeout=15min 0 0" >>"$1/etc/fstab"',
        'chroot "$1" systemctl enable check.service',
        'chroot "$1" systemctl mask apt-daily.timer apt-daily-upgrade.timer systemd-timesyncd.service',
    ]
    command = [
        "mmdebstrap",
        "--variant=minbase",
        f"--include={','.join(PACKAGES)}",
        f"--essential-hook={initrd}",
    ]
    for left_out in ["doc", "man", "locale"]:
        command.append(f"--dpkgopt=path-exclude=/usr/share/{left_out}/*")
    with tempfile.TemporaryDirectory() as units:
        for name, text in [("check.service", SERVICE), ("emergency.service", EMERGENCY)]:
            unit = Path(units) / name
            unit.write_text(text)
            hooks.insert(0, f'install -m 644 {unit} "$1/etc/systemd/system/{name}"')
        command += [f"--customize-hook={hook}" for hook in hooks]
        subprocess.run(
            [*command, suite, str(root), MIRROR], check=True, stderr=subprocess.PIPE, text=True
        )


def make_file_system(folder, file, spare):
    """Writes a folder into a file system with `spare` MiB of room."""
    listed = subprocess.run(["du", "-sm", folder], check=True, capture_output=True, text=True)
    size = int(int(listed.stdout.split()[0]) * 1.2) + spare
    command = ["mke2fs", "-q", "-t", "ext4", "-d", folder, file, f"{size}M"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
