"""Finishes an image from within while it is built: its user and folders, no program that lends
rights, bytecode of every package.

Runs once, as root, without a network, and without `site`, so that no code of a package runs.
Everything that it makes gets the same time, and bytecode is made in the same order by processes
that know the same, so that the same image gets the same layers wherever it is built.
"""

import os
import stat
import sys

# The earliest time that every archive can hold.
TIME = 315532800
# Not the number of cores: who compiles what must not depend on the machine.
COMPILERS = 8


def main(place, uid, gid, name, home, work):
    changed = {"/"}
    if uid != 0:
        add_group(gid, name, changed)
        add_user(uid, gid, name, home, changed)
    make_folder(home, uid, gid, changed)
    make_folder(work, uid, gid, changed)
    take_back_rights()
    compile_packages(place)
    changed.add(os.path.dirname(place))
    for path in sorted(changed, key=len, reverse=True):
        os.utime(path, (TIME, TIME))


def lines_of(path):
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().splitlines()
    except FileNotFoundError:
        return []


def write_lines(path, lines, changed):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write("".join(line + "\n" for line in lines))
    os.chmod(path, 0o644)
    changed.update((path, os.path.dirname(path)))


def fields(lines):
    return [line.split(":") for line in lines]


def free_name(name, number, lines):
    """A name that no line has yet."""
    taken = {field[0] for field in fields(lines)}
    return name if name not in taken else "%s%d" % (name, number)


def add_group(gid, name, changed):
    lines = lines_of("/etc/group")
    if not any(field[2:3] == [str(gid)] for field in fields(lines)):
        write_lines(
            "/etc/group", lines + ["%s:x:%d:" % (free_name(name, gid, lines), gid)], changed
        )


def add_user(uid, gid, name, home, changed):
    """Adds the user, or lets the one that has this number already be at home there."""
    lines = lines_of("/etc/passwd")
    own = [number for number, field in enumerate(fields(lines)) if field[2:3] == [str(uid)]]
    if own:
        field = lines[own[0]].split(":")
        lines[own[0]] = ":".join(field[:3] + [str(gid)] + field[4:5] + [home] + field[6:])
    else:
        lines.append("%s:x:%d:%d::%s:/bin/sh" % (free_name(name, uid, lines), uid, gid, home))
    write_lines("/etc/passwd", lines, changed)


def make_folder(path, uid, gid, changed):
    os.makedirs(path, exist_ok=True)
    os.chown(path, uid, gid)
    os.chmod(path, 0o700 if uid == 0 else 0o755)
    while path != "/":
        changed.add(path)
        path = os.path.dirname(path)


def take_back_rights():
    """No program runs with more rights than whoever starts it."""
    device = os.lstat("/").st_dev
    for folder, folders, names in os.walk("/"):
        # What is mounted for the build is not part of the image.
        folders[:] = [each for each in folders if is_on(os.path.join(folder, each), device)]
        for name in names:
            path = os.path.join(folder, name)
            try:
                found = os.lstat(path)
                if not stat.S_ISREG(found.st_mode) or found.st_dev != device:
                    continue
                if found.st_mode & (stat.S_ISUID | stat.S_ISGID):
                    os.chmod(path, stat.S_IMODE(found.st_mode) & 0o1777)
                if "security.capability" in os.listxattr(path, follow_symlinks=False):
                    os.removexattr(path, "security.capability", follow_symlinks=False)
            except FileNotFoundError:
                continue


def is_on(path, device):
    try:
        return os.lstat(path).st_dev == device
    except FileNotFoundError:
        return False


def compile_packages(place):
    """Makes the bytecode of every module. It is never compared with its source: an image does not
    change.
    """
    modules = []
    for folder, folders, names in os.walk(os.path.join(place, "lib")):
        folders.sort()
        modules += [os.path.join(folder, name) for name in sorted(names) if name.endswith(".py")]
    compilers = []
    for number in range(COMPILERS):
        process = os.fork()
        if process == 0:
            status = 1
            try:
                compile_modules(modules[number::COMPILERS])
                status = 0
            finally:
                os._exit(status)
        compilers.append(process)
    failed = [process for process in compilers if os.waitpid(process, 0)[1] != 0]
    if failed:
        sys.exit("the packages could not be compiled: is the disk full?")
    for folder, folders, names in os.walk(place, topdown=False):
        if os.path.basename(folder) == "__pycache__":
            for name in names:
                os.utime(os.path.join(folder, name), (TIME, TIME))
        os.utime(folder, (TIME, TIME))


def compile_modules(modules):
    import py_compile

    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    for module in modules:
        try:
            py_compile.compile(module, doraise=True, invalidation_mode=mode)
        except (py_compile.PyCompileError, UnicodeError):
            # Some packages carry files that are no valid Python for this version, such as
            # templates.
            continue


if __name__ == "__main__":
    # The order of names in a set is part of the bytecode, and without this it is another one each
    # time.
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-s", "-S", "-B"] + sys.argv)
    os.umask(0o022)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:7])
