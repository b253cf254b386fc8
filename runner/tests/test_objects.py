"""Objects over fork and undo: a table of the results of each kind in the source and in copies.

A row has code that sets up an object and code that uses it. Between the two a copy is made. The use
must have the same result in all three, or a different one in both copies, or raise a clear
exception that was reported as a loss. Nothing may wait longer than the harness does.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import unittest
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from cellblock_runner import threads

from .harness import TIMEOUT, Copy, Result, Runner
from .test_branch import _can_mount


class Row(NamedTuple):
    """A kind of object. `expected` is the result in a copy."""

    kind: str
    setup: str
    use: str
    expected: Same | New | Fails
    # Packages without which the row is skipped.
    needs: tuple[str, ...] = ()


class Same(NamedTuple):
    """The use has the same result as in the source. With `told`, this is among the losses, too."""

    told: str = ""
    only_fork: bool = False


class New(NamedTuple):
    """The use has another result than in the source."""


class Fails(NamedTuple):
    """The use raises one of these, and the loss is reported. With `only_fork`, only in a fork."""

    exceptions: tuple[str, ...]
    told: str
    only_fork: bool = False


_DEAD = ("OSError", "ValueError", "ConnectionResetError", "BrokenPipeError", "EOFError")

# Every row of one group runs in the same environment.
_PLAIN = [
    # State of Python itself.
    Row("number, text, bytes", "value = 1, 'a', b'b', 2.5, 3j, None", "value", Same()),
    Row("list, dict, set", "value = [1, {'a': {2}}]", "value[1]['a'].add(3); value", Same()),
    Row(
        "function with closure",
        "def outer():\n    n = 0\n    def inner():\n        nonlocal n; n += 1; return n\n"
        "    return inner\nf = outer(); f()",
        "f()",
        Same(),
    ),
    Row(
        "class and instance",
        "class A:\n    x = 1\na = A(); a.y = 2",
        "a.x, a.y, type(a).__name__",
        Same(),
    ),
    Row(
        "slots and property",
        "class A:\n    __slots__ = ('_x',)\n    @property\n    def x(self): return self._x\n"
        "a = A(); a._x = 5",
        "a.x",
        Same(),
    ),
    Row(
        "data class",
        "import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int = 1\np = P(3)",
        "p == P(3), p",
        Same(),
    ),
    Row(
        "enumeration",
        "import enum\nclass C(enum.Enum):\n    RED = 1\nc = C.RED",
        "c is C.RED",
        Same(),
    ),
    Row(
        "named tuple",
        "import collections\nT = collections.namedtuple('T', 'a b')\nt = T(1, 2)",
        "t.b",
        Same(),
    ),
    Row(
        "generator",
        "def count():\n    n = 0\n    while True: n += 1; yield n\ng = count(); next(g)",
        "next(g), next(g)",
        Same(),
    ),
    Row(
        "iterator of itertools",
        "import itertools\ni = itertools.islice(itertools.cycle('abc'), 10); next(i)",
        "list(i)",
        Same(),
    ),
    Row(
        "coroutine that has begun",
        "class Pause:\n    def __await__(self): return (yield 'paused')\nasync def co():\n"
        "    return await Pause() + 1\nc = co(); paused = c.send(None)",
        "try: c.send(4)\nexcept StopIteration as end: print(end.value)",
        Same(),
    ),
    Row(
        "context manager that is open",
        "import contextlib\n@contextlib.contextmanager\ndef held():\n"
        "    log.append('in'); yield 5; log.append('out')\nlog = []; m = held(); m.__enter__()",
        "m.__exit__(None, None, None), log",
        Same(),
    ),
    Row(
        "weak reference",
        "import weakref\nclass A: pass\na = A(); w = weakref.ref(a)",
        "w() is a",
        Same(),
    ),
    Row(
        "exception with traceback",
        "try: 1 / 0\nexcept ZeroDivisionError as e: error = e",
        "import traceback\n"
        "''.join(traceback.format_exception(type(error), error, error.__traceback__))[-30:]",
        Same(),
    ),
    Row(
        "cached function",
        "import functools\n@functools.lru_cache\ndef square(n): calls.append(n); return n * n\n"
        "calls = []; square(3)",
        "square(3), calls",
        Same(),
    ),
    Row(
        "regular expression and match",
        "import re\nm = re.search('(b)(c)', 'abcd')",
        "m.groups(), m.span()",
        Same(),
    ),
    Row(
        "module of the folder",
        "open('mine.py', 'w').write('x = 5')\nimport mine; mine.x = 6",
        "import mine\nmine.x",
        Same(),
    ),
    Row(
        "decimal context",
        "import decimal\ndecimal.getcontext().prec = 5",
        "decimal.Decimal(1) / 3",
        Same(),
    ),
    Row(
        "context variable",
        "import contextvars\nv = contextvars.ContextVar('v', default=0); v.set(7)",
        "v.get()",
        Same(),
    ),
    Row(
        "thread-local value",
        "import threading\nlocal = threading.local(); local.x = 4",
        "local.x",
        Same(),
    ),
    Row(
        "interpreter settings",
        "import sys, gc\nsys.setrecursionlimit(2345); gc.set_threshold(500, 5, 5)",
        "sys.getrecursionlimit(), gc.get_threshold()",
        Same(),
    ),
    Row(
        "warnings filter",
        "import warnings\nwarnings.simplefilter('error', DeprecationWarning)",
        "import warnings\ntry: warnings.warn('x', DeprecationWarning)\n"
        "except DeprecationWarning: print('raised')",
        Same(),
    ),
    Row(
        "trace of memory",
        "import tracemalloc\ntracemalloc.start(); kept = bytearray(100_000)",
        "tracemalloc.is_tracing(), tracemalloc.get_traced_memory()[0] > 90_000",
        Same(),
    ),
    Row(
        "240 MB of memory",
        "big = bytearray(240_000_000); big[-1] = 9",
        "len(big), big[-1]",
        Same(),
    ),
    Row("display history", "41 + 1", "_ , Out[max(Out)]", Same()),
    # Process attributes.
    Row(
        "current folder",
        "import os\nos.mkdir('sub'); os.chdir('sub')",
        "os.path.basename(os.getcwd())",
        Same(),
    ),
    Row(
        "environment variable",
        "import os\nos.environ['MINE'] = 'x'",
        "import subprocess\nsubprocess.check_output('echo $MINE', shell=True)",
        Same(),
    ),
    Row(
        "mask of new files",
        "import os\nold = os.umask(0o027)",
        "open('masked', 'w').close(); oct(os.stat('masked').st_mode & 0o777)",
        Same(),
    ),
    Row(
        "signal handler",
        "import signal\nseen = []\nsignal.signal(signal.SIGUSR1, lambda *_: seen.append('usr1'))",
        "import os\nos.kill(os.getpid(), signal.SIGUSR1); seen",
        Same(),
    ),
    Row(
        "blocked signal",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])",
        "signal.SIGUSR2 in signal.pthread_sigmask(signal.SIG_BLOCK, [])",
        Same(),
    ),
    Row(
        "resource limit",
        "import resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
        "resource.getrlimit(resource.RLIMIT_CORE)",
        Same(),
    ),
    Row("niceness", "import os\nos.nice(2) > 0", "os.nice(0)", Same()),
    Row(
        "exit handler",
        "import atexit\natexit.register(print, 'end')",
        "atexit._ncallbacks() > 0",
        Same(),
    ),
    Row(
        "locale",
        "import locale\nlocale.setlocale(locale.LC_ALL, 'C')",
        "locale.setlocale(locale.LC_ALL)",
        Same(),
    ),
    Row(
        "time zone",
        "import os, time\nos.environ['TZ'] = 'Asia/Tokyo'; time.tzset()",
        "time.strftime('%H', time.localtime(0))",
        Same(),
    ),
    Row("process id", "import os\npid = os.getpid()", "os.getpid()", New()),
    Row("new UUID", "import uuid\nu = uuid.uuid4()", "uuid.uuid4()", New()),
    Row("unseeded random", "import random\nr = random.random()", "random.random()", New()),
    Row("secret", "import secrets\ns = secrets.token_hex()", "secrets.token_hex()", New()),
    Row(
        "temporary name",
        "import tempfile\nt = next(tempfile._get_candidate_names())",
        "next(tempfile._get_candidate_names())",
        New(),
    ),
    Row(
        "seeded random",
        "import random\nrandom.seed(1)",
        "random.random(), random.gauss(0, 1)",
        Same(),
    ),
    Row("random generator of its own", "import random\nr = random.Random()", "r.random()", Same()),
    Row(
        "timer of the process",
        "import signal\n"
        "signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, "
        "1000)",
        "signal.getitimer(signal.ITIMER_REAL)[0] > 0",
        Fails((), "1 timer"),
    ),
    # Files.
    Row(
        "file that is read",
        "open('f', 'w').write('one\\ntwo\\n'); f = open('f'); f.readline()",
        "f.readline()",
        Same(),
    ),
    Row(
        "file with unflushed text",
        "f = open('f', 'w'); f.write('kept')",
        "f.flush(); open('f').read()",
        Same(),
    ),
    Row(
        "file that is appended to",
        "open('f', 'w').write('1'); f = open('f', 'a')",
        "f.write('2'); f.flush(); open('f').read()",
        Same(),
    ),
    Row(
        "binary file at an offset",
        "f = open('f', 'w+b', 0); f.write(bytes(10)); f.seek(5)",
        "f.tell()",
        Same(),
    ),
    Row(
        "file that was deleted",
        "import os\nf = open('f', 'w+'); f.write('kept'); f.flush(); os.unlink('f')",
        "f.seek(0); f.read()",
        Same(),
    ),
    Row(
        "temporary file",
        "import tempfile\nf = tempfile.TemporaryFile('w+'); f.write('kept'); f.flush()",
        "f.seek(0); f.read()",
        Same(),
    ),
    Row(
        "named temporary file of the folder",
        "import tempfile\nf = tempfile.NamedTemporaryFile('w+', dir='.'); f.write('x'); f.flush()",
        "f.seek(0); f.read()",
        Same(),
    ),
    Row(
        "spooled temporary file",
        "import tempfile\nf = tempfile.SpooledTemporaryFile(10); f.write(b'x' * 50)",
        "f.seek(0); len(f.read())",
        Same(),
    ),
    Row(
        "temporary folder of the folder",
        "import tempfile\nd = tempfile.TemporaryDirectory(dir='.')",
        "import os\nos.path.isdir(d.name)",
        Same(),
    ),
    Row(
        "duplicate descriptor",
        "import os\nf = open('f', 'w+'); n = os.dup(f.fileno()); f.write('ab'); f.flush()",
        "os.lseek(n, 0, os.SEEK_CUR)",
        Same(),
    ),
    Row(
        "folder descriptor",
        "import os\nd = os.open('.', os.O_RDONLY); open('x', 'w').close()",
        "sorted(os.listdir(d))",
        Same(),
    ),
    Row(
        "directory iterator",
        "import os\n"
        "[open(str(n), 'w').close() for n in range(3)]; found = sorted(e.name for e in "
        "os.scandir('.'))",
        "found",
        Same(),
    ),
    Row(
        "file with a lock",
        "import fcntl\nf = open('lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX)",
        "import subprocess\nsubprocess.call(['flock', '-n', 'lock', 'true'])",
        Same(),
    ),
    Row(
        "file lock of a range",
        "import fcntl\n"
        "f = open('lock', 'w+'); f.write('abc'); f.flush(); fcntl.lockf(f, fcntl.LOCK_EX, 1)",
        "f.seek(0); f.read()",
        Same(),
    ),
    Row(
        "log file",
        "import logging\n"
        "h = logging.FileHandler('log'); l = logging.getLogger('mine'); l.addHandler(h); "
        "l.warning('one')",
        "l.warning('two'); open('log').read()",
        Same(),
    ),
    Row(
        "rotating log",
        "import logging.handlers\n"
        "h = logging.handlers.RotatingFileHandler('log', maxBytes=20, backupCount=1); l = "
        "logging.getLogger('mine'); l.addHandler(h); l.warning('one')",
        "l.warning('x' * 30); sorted(__import__('os').listdir('.'))",
        Same(),
    ),
    Row(
        "zip archive",
        "import zipfile\nz = zipfile.ZipFile('z', 'w'); z.writestr('a', 'one')",
        "z.writestr('b', 'two'); z.close(); zipfile.ZipFile('z').namelist()",
        Same(),
    ),
    Row(
        "gzip stream",
        "import gzip\ng = gzip.open('g', 'wb'); g.write(b'one')",
        "g.write(b'two'); g.close(); gzip.open('g').read()",
        Same(),
    ),
    Row(
        "tar archive",
        "import io, tarfile\n"
        "t = tarfile.open('t', 'w'); i = tarfile.TarInfo('a'); i.size = 1; t.addfile(i, "
        "io.BytesIO(b'x'))",
        "t.close(); tarfile.open('t').getnames()",
        Same(),
    ),
    Row(
        "csv reader",
        "import csv\n"
        "open('c', 'w').write('a,b\\n1,2\\n3,4\\n'); r = csv.DictReader(open('c')); next(r)",
        "next(r)",
        Same(),
    ),
    Row(
        "shelf",
        "import shelve\ns = shelve.open('shelf', writeback=True); s['a'] = [1]",
        "s['a'].append(2); s['a']",
        Same(),
    ),
    Row(
        "pickler stream",
        "import io, pickle\nb = io.BytesIO(); p = pickle.Pickler(b); p.dump([1])",
        "p.dump([2]); b.seek(0); pickle.load(b), pickle.load(b)",
        Same(),
    ),
    Row(
        "mapped file",
        "import mmap\n"
        "f = open('m', 'w+b'); f.write(b'one'); f.flush(); m = mmap.mmap(f.fileno(), 3)",
        "m[:]",
        Same(),
    ),
    Row(
        "mapped memory",
        "import mmap\nm = mmap.mmap(-1, 100); m[:3] = b'abc'",
        "m[0:3] = bytes(m[1:4]); m[:3]",
        Same(),
    ),
    Row(
        "shared memory",
        "from multiprocessing import shared_memory\n"
        "s = shared_memory.SharedMemory(create=True, size=10); s.buf[0] = 7",
        "s.buf[0]",
        Same(),
    ),
    Row(
        "memory file",
        "import os\nn = os.memfd_create('x'); os.write(n, b'abc')",
        "os.pread(n, 10, 0)",
        Same(),
    ),
    Row(
        "sqlite in memory",
        "import sqlite3\n"
        "d = sqlite3.connect(':memory:'); d.execute('create table t (x)'); d.execute('insert "
        "into t values (1)')",
        "d.execute('insert into t values (2)'); d.execute('select * from t').fetchall()",
        Same(),
    ),
    Row(
        "sqlite cursor",
        "import sqlite3\n"
        "d = sqlite3.connect(':memory:'); c = d.execute('with recursive t(x) as (select 1 union "
        "all select x + 1 from t limit 5) select x from t'); c.fetchone()",
        "c.fetchall()",
        Same(),
    ),
    Row(
        "sqlite in a file, read",
        "import sqlite3\n"
        "d = sqlite3.connect('db'); d.execute('create table t (x)'); d.execute('insert into t "
        "values (1)'); d.commit()",
        "d.execute('select * from t').fetchall()",
        Same("writing to 1 sqlite", only_fork=True),
    ),
    Row(
        "sqlite in a file, written",
        "import sqlite3\nd = sqlite3.connect('db'); d.execute('create table t (x)'); d.commit()",
        "d.execute('insert into t values (2)'); d.commit(); d.execute('select * from "
        "t').fetchall()",
        Fails(("OperationalError",), "writing to 1 sqlite", only_fork=True),
    ),
    Row(
        "sqlite with a write-ahead log",
        "import sqlite3\n"
        "d = sqlite3.connect('db'); d.execute('pragma journal_mode=wal').fetchall(); "
        "d.execute('create table t (x)'); d.commit()",
        "d.execute('insert into t values (2)'); d.commit(); d.execute('select * from "
        "t').fetchall()",
        Same(),
    ),
    # Descriptors that no other process has.
    Row(
        "pipe with both ends",
        "import os\nr, w = os.pipe(); os.write(w, b'in it')",
        "os.read(r, 5)",
        Same(),
    ),
    Row(
        "event counter",
        "import ctypes, os\nn = ctypes.CDLL(None).eventfd(3, 0)",
        "os.read(n, 8)",
        Same(),
    ),
    Row(
        "selector of a pipe",
        "import os, selectors\n"
        "r, w = os.pipe(); s = selectors.DefaultSelector(); s.register(r, selectors.EVENT_READ)",
        "os.write(w, b'x'); len(s.select(5))",
        Same(),
    ),
    Row(
        "pair of sockets",
        "import socket\na, b = socket.socketpair(); a.send(b'in it')",
        "b.recv(5)",
        Same(),
    ),
    Row(
        "pair of sockets without waiting",
        "import socket\na, b = socket.socketpair(); a.setblocking(False)\ntry: a.recv(1)\n"
        "except BlockingIOError: pass",
        "b.send(b'x'); a.recv(1), a.getblocking(), b.getblocking()",
        Same(),
    ),
    Row(
        "pair of datagram sockets",
        "import socket\n"
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.send(b'one'); "
        "a.send(b'two')",
        "b.recv(9), b.recv(9)",
        Same(),
    ),
    Row(
        "pair of sockets whose one side has ended",
        "import socket\na, b = socket.socketpair(); a.send(b'last'); a.shutdown(socket.SHUT_WR)",
        "b.recv(9), b.recv(9), b.send(b'x'), a.recv(1)",
        Same(),
    ),
    Row(
        "half of a pair of sockets",
        "import socket\na, b = socket.socketpair(); b.close()",
        "a.fileno() > 0 and a.recv(1)",
        Fails(_DEAD, "1 connection"),
    ),
    Row(
        "connection of multiprocessing",
        "import multiprocessing\na, b = multiprocessing.Pipe(); a.send([1])",
        "b.recv()",
        Same(),
    ),
    Row(
        "timer descriptor",
        "import ctypes, os, select\n"
        "library = ctypes.CDLL(None); n = library.timerfd_create(1, 0)\n"
        "times = (ctypes.c_long * 4)(0, 0, 0, 1_000_000); library.timerfd_settime(n, 0, times, "
        "None)",
        "select.select([n], [], [], 10)[0] == [n]",
        Same(),
    ),
    Row(
        "socket that listens",
        "import socket\ns = socket.create_server(('127.0.0.1', 0))",
        "c = socket.create_connection(s.getsockname()); s.accept()[0].fileno() > 0",
        Fails(_DEAD, "1 listening socket"),
    ),
    Row(
        "connected socket",
        "import socket\nlistener = socket.create_server(('127.0.0.1', 0)); c = "
        "socket.create_connection(listener.getsockname()); s = listener.accept()[0]",
        "c.send(b'x'); s.recv(1)",
        Fails(_DEAD, "connections"),
    ),
    Row(
        "datagram socket",
        "import socket\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('127.0.0.1', 0))",
        "s.sendto(b'x', s.getsockname()); s.recv(1)",
        Fails(_DEAD, "1 socket"),
    ),
    Row(
        "server in a thread",
        "import http.server, threading, urllib.request\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(204); self.end_headers()\n"
        "    def log_message(self, *_): pass\ns = http.server.HTTPServer(('127.0.0.1', 0), H); "
        "threading.Thread(target=s.serve_forever, daemon=True).start()",
        "urllib.request.urlopen(f'http://127.0.0.1:{s.server_port}', timeout=5).status",
        Fails(("URLError", *_DEAD), "1 listening socket"),
    ),
    # Processes.
    Row(
        "finished process",
        "import subprocess\np = subprocess.run(['echo', 'x'], capture_output=True)",
        "p.stdout, p.returncode",
        Same(),
    ),
    Row(
        "process that runs",
        "import subprocess\n"
        "p = subprocess.Popen('cat', stdin=subprocess.PIPE, stdout=subprocess.PIPE)",
        "p.stdin.write(b'x'); p.stdin.flush(); p.communicate()[0]",
        Fails(_DEAD, "1 subprocess"),
    ),
    Row(
        "queue of multiprocessing",
        "import multiprocessing\nq = multiprocessing.Queue(); q.put(1); q.get()",
        "q.put(2); q.get(timeout=10)",
        Same(),
    ),
    Row(
        "manager",
        "import multiprocessing\nm = multiprocessing.Manager(); d = m.dict(a=1)",
        "d['a']",
        Fails(("ConnectionRefusedError", "FileNotFoundError", *_DEAD), "subprocess"),
    ),
    Row(
        "ProcessPoolExecutor",
        "from concurrent.futures import ProcessPoolExecutor as P\n"
        "ex = P(1); ex.submit(abs, -1).result()",
        "ex.submit(abs, -5).result(10)",
        Fails(("BrokenProcessPool",), "subprocess"),
    ),
    Row(
        "pool of multiprocessing",
        "import multiprocessing\np = multiprocessing.Pool(1); p.map(abs, [-1])",
        "p.map_async(abs, [-5]).get(10)",
        Fails(("ValueError", "RuntimeError"), "subprocess"),
    ),
    Row(
        "ProcessPoolExecutor before its first use",
        "from concurrent.futures import ProcessPoolExecutor as P\nex = P(1)",
        "ex.submit(abs, -5).result(10)",
        Same(),
    ),
    # asyncio.
    Row(
        "task that waits for time",
        "import asyncio\nasync def co(): await asyncio.sleep(0.05); return 5\n"
        "t = asyncio.ensure_future(co()); await asyncio.sleep(0)",
        "await t",
        Same(),
    ),
    Row(
        "task of a cell without await",
        "import asyncio\nasync def co(): await asyncio.sleep(0.05); return 5\n"
        "t = asyncio.create_task(co())",
        "await t",
        Same(),
    ),
    Row(
        "queue of asyncio",
        "import asyncio\nq = asyncio.Queue(); await q.put(1)",
        "await q.get()",
        Same(),
    ),
    Row(
        "lock of asyncio",
        "import asyncio\nl = asyncio.Lock(); await l.acquire()",
        "l.locked(), l.release(), await l.acquire()",
        Same(),
    ),
    Row(
        "work given to a thread",
        "import asyncio\nawait asyncio.to_thread(abs, -1)",
        "await asyncio.to_thread(abs, -5)",
        Same(),
    ),
    Row(
        "loop of its own",
        "import asyncio\nl = asyncio.new_event_loop(); l.run_until_complete(asyncio.sleep(0))",
        "l.run_until_complete(asyncio.sleep(0, 5))",
        Same(),
    ),
    Row(
        "loop in a thread",
        "import asyncio, threading\n"
        "l = asyncio.new_event_loop(); threading.Thread(target=l.run_forever, "
        "daemon=True).start()",
        "asyncio.run_coroutine_threadsafe(asyncio.sleep(0, 5), l).result(10)",
        Same(),
    ),
    Row(
        "asynchronous generator",
        "async def count():\n    for n in range(5): yield n\ng = count(); await g.__anext__()",
        "[n async for n in g]",
        Same(),
    ),
    Row(
        "connection of asyncio",
        "import asyncio\nasync def serve(r, w): w.write(await r.read(1)); await w.drain()\n"
        "s = await asyncio.start_server(serve, '127.0.0.1', 0); r, w = await "
        "asyncio.open_connection(*s.sockets[0].getsockname())",
        "w.write(b'x'); await asyncio.wait_for(r.read(1), 2)",
        Fails(("TimeoutError", "ConnectionResetError", *_DEAD), "connection"),
    ),
]

# Threads continue in copies where the machine code for it exists.
_THREADS = [
    Row(
        "ThreadPoolExecutor",
        "from concurrent.futures import ThreadPoolExecutor as T\n"
        "ex = T(2); list(ex.map(abs, [-1, -2]))",
        "ex.submit(abs, -5).result(10), len(list(ex.map(abs, range(50))))",
        Same(),
    ),
    Row(
        "pool of threads of multiprocessing",
        "from multiprocessing.pool import ThreadPool\np = ThreadPool(2); p.map(abs, [-1])",
        "p.map_async(abs, [-5]).get(10)",
        Same(),
    ),
    Row(
        "queue with a worker",
        "import queue, threading\nq, done = queue.Queue(), queue.Queue()\ndef work():\n"
        "    while True: done.put(q.get() + 1)\n"
        "threading.Thread(target=work, daemon=True).start()",
        "q.put(1); done.get(timeout=10)",
        Same(),
    ),
    Row(
        "lock that a thread holds",
        "import threading\nl, go, got = threading.Lock(), threading.Event(), threading.Event()\n"
        "def hold():\n    with l: got.set(); go.wait()\n"
        "threading.Thread(target=hold, daemon=True).start(); got.wait()",
        "go.set(); l.acquire(timeout=10)",
        Same(),
    ),
    Row(
        "thread that waits for time",
        "import threading, time\nticks = 0\ndef tick():\n    global ticks\n"
        "    while True: time.sleep(0.002); ticks += 1\n"
        "threading.Thread(target=tick, daemon=True).start()",
        "before = ticks\nwhile ticks < before + 3: time.sleep(0.002)\nTrue",
        Same(),
    ),
    Row(
        "timer thread",
        "import threading\n"
        "rang = threading.Event(); t = threading.Timer(0.3, rang.set); t.daemon = True; "
        "t.start()",
        "rang.wait(10)",
        Same(),
    ),
    Row(
        "barrier",
        "import threading\n"
        "b = threading.Barrier(2); threading.Thread(target=b.wait, daemon=True).start()",
        "b.wait(10) in (0, 1)",
        Same(),
    ),
    Row(
        "condition",
        "import threading\nc, seen = threading.Condition(), []\ndef wait():\n"
        "    with c: c.wait(); seen.append(1); c.notify_all()\n"
        "threading.Thread(target=wait, daemon=True).start()",
        "import time\nlimit = time.monotonic() + 10\n"
        "while not seen and time.monotonic() < limit:\n"
        "    with c: c.notify_all(); c.wait(0.01)\nseen",
        Same(),
    ),
    Row(
        "log listener",
        "import logging, logging.handlers, queue\nq = queue.Queue(); seen = []\n"
        "class H(logging.Handler):\n"
        "    def emit(self, record): seen.append(record.getMessage())\n"
        "listener = logging.handlers.QueueListener(q, H()); listener.start(); l = "
        "logging.getLogger('mine'); l.addHandler(logging.handlers.QueueHandler(q))",
        "l.warning('told'); listener.stop(); seen",
        Same(),
    ),
    Row(
        "thread that reads a pipe",
        "import os, queue, threading\nr, w = os.pipe(); got = queue.Queue()\n"
        "threading.Thread(target=lambda: got.put(os.read(r, 1)), daemon=True).start()",
        "os.write(w, b'x'); got.get(timeout=10)",
        Same(),
    ),
]

_PACKAGES = [
    Row(
        "numpy array and BLAS",
        "import numpy as np\na = np.arange(10_000.).reshape(100, 100); b = a @ a",
        "float((a @ a - b).sum())",
        Same(),
        ("numpy",),
    ),
    Row(
        "numpy memory map",
        "import numpy as np\n"
        "m = np.memmap('m', dtype='int32', mode='w+', shape=10); m[:] = 3; m.flush()",
        "int(m.sum())",
        Same(),
        ("numpy",),
    ),
    Row(
        "numpy generator",
        "import numpy as np\ng = np.random.default_rng(1); g.random()",
        "float(g.random())",
        Same(),
        ("numpy",),
    ),
    Row(
        "numpy seeded",
        "import numpy as np\nnp.random.seed(1)",
        "float(np.random.rand())",
        Same(),
        ("numpy",),
    ),
    Row(
        "numpy unseeded",
        "import numpy as np\nx = np.random.rand()",
        "float(np.random.rand())",
        New(),
        ("numpy",),
    ),
    Row(
        "scipy fft workers",
        "import scipy.fft, numpy as np\nx = np.ones((8, 64)); y = scipy.fft.fft(x, workers=2)",
        "abs(scipy.fft.fft(x, workers=2) - y).max()",
        Same(),
        ("scipy",),
    ),
    Row(
        "pandas frame and group",
        "import pandas as pd\n"
        "d = pd.DataFrame({'a': [1, 1, 2], 'b': [1., 2., 3.]}); g = d.groupby('a')",
        "g.b.sum().tolist()",
        Same(),
        ("pandas",),
    ),
    Row(
        "matplotlib figure",
        "import matplotlib.pyplot as plt\nfig, ax = plt.subplots(); line = ax.plot([1, 2])",
        "import io\n"
        "b = io.BytesIO(); fig.savefig(b, format='png'); plt.close(fig); b.getvalue()[:4]",
        Same(),
        ("matplotlib",),
    ),
    Row(
        "random forest, parallel",
        "from sklearn.ensemble import RandomForestClassifier as R\nimport numpy as np\n"
        "X = np.random.default_rng(0).random((100, 4)); y = X[:, 0] > .5; m = R(10, n_jobs=2, "
        "random_state=0).fit(X, y)",
        "float(R(10, n_jobs=2, random_state=0).fit(X, y).score(X, y))",
        Same(),
        ("sklearn",),
    ),
    Row(
        "KMeans (OpenMP)",
        "from sklearn.cluster import KMeans\nimport numpy as np\n"
        "X = np.random.default_rng(0).random((2000, 4)); KMeans(3, n_init=2, "
        "random_state=0).fit(X);",
        "round(KMeans(3, n_init=2, random_state=0).fit(X).inertia_, 3)",
        Same(),
        ("sklearn",),
    ),
    Row(
        "histogram boosting (OpenMP)",
        "from sklearn.ensemble import HistGradientBoostingRegressor as H\nimport numpy as np\n"
        "X = np.random.default_rng(0).random((500, 4)); y = X[:, 0]; H(max_iter=5).fit(X, y);",
        "round(H(max_iter=5, random_state=0).fit(X, y).score(X, y), 3)",
        Same(),
        ("sklearn",),
    ),
    Row(
        "joblib, processes",
        "from joblib import Parallel, delayed\n"
        "Parallel(n_jobs=2)(delayed(abs)(i) for i in range(4));",
        "Parallel(n_jobs=2)(delayed(abs)(i) for i in range(4))",
        Same("subprocess"),
        ("joblib",),
    ),
    Row(
        "joblib, threads",
        "from joblib import Parallel, delayed\n"
        "Parallel(n_jobs=2, backend='threading')(delayed(abs)(i) for i in range(4));",
        "Parallel(n_jobs=2, backend='threading')(delayed(abs)(i) for i in range(4))",
        Same(),
        ("joblib",),
    ),
    Row(
        "LightGBM",
        "import lightgbm, numpy as np\n"
        "X = np.random.default_rng(0).random((200, 4)); y = X[:, 0]; m = "
        "lightgbm.LGBMRegressor(n_estimators=3, verbose=-1).fit(X, y)",
        "len(lightgbm.LGBMRegressor(n_estimators=3, verbose=-1).fit(X, y).predict(X))",
        Same(),
        ("lightgbm",),
    ),
    Row(
        "XGBoost",
        "import xgboost, numpy as np\n"
        "X = np.random.default_rng(0).random((200, 4)); y = X[:, 0]; m = "
        "xgboost.XGBRegressor(n_estimators=3).fit(X, y)",
        "len(xgboost.XGBRegressor(n_estimators=3).fit(X, y).predict(X))",
        Same(),
        ("xgboost",),
    ),
    Row(
        "numba",
        "import numba\n@numba.njit\ndef f(x): return x + 1\nf(1)",
        "f(5)",
        Same(),
        ("numba",),
    ),
    Row(
        "numba, parallel",
        "import numba, numpy as np\n@numba.njit(parallel=True)\ndef f(a):\n    s = 0.\n"
        "    for i in numba.prange(len(a)): s += a[i]\n    return s\na = np.ones(1000); f(a)",
        "f(a)",
        Same(),
        ("numba",),
    ),
    Row(
        "polars group",
        "import polars as pl\n"
        "d = pl.DataFrame({'a': list(range(1000))}); n = len(d.group_by('a').len())",
        "len(d.group_by('a').len())",
        Same(),
        ("polars",),
    ),
    Row(
        "polars lazy frame",
        "import polars as pl\nd = pl.LazyFrame({'a': [3, 1, 2]}); d.collect();",
        "d.sort('a').collect()['a'].to_list()",
        Same(),
        ("polars",),
    ),
    Row(
        "duckdb in memory",
        "import duckdb\nd = duckdb.connect(); d.execute('create table t as select 1 x');",
        "d.execute('select * from t').fetchall()",
        Same(),
        ("duckdb",),
    ),
    Row(
        "duckdb in a file",
        "import duckdb\nd = duckdb.connect('db'); d.execute('create table t as select 1 x');",
        "d.execute('select * from t').fetchall()",
        Same(),
        ("duckdb",),
    ),
    Row(
        "duckdb of a frame",
        "import duckdb, pandas as pd\n"
        "f = pd.DataFrame({'x': [1, 2]}); duckdb.sql('select sum(x) from f').fetchall()",
        "duckdb.sql('select sum(x) from f').fetchall()",
        Same(),
        ("duckdb", "pandas"),
    ),
    Row(
        "pyarrow table",
        "import pyarrow as pa, pyarrow.compute as pc\nt = pa.table({'a': [1, 2, 3]})",
        "pc.sum(t['a']).as_py()",
        Same(),
        ("pyarrow",),
    ),
    Row(
        "parquet file",
        "import pyarrow as pa, pyarrow.parquet as pq\n"
        "pq.write_table(pa.table({'a': [1, 2]}), 'p'); f = pq.ParquetFile('p')",
        "f.read().num_rows",
        Same(),
        ("pyarrow",),
    ),
    Row(
        "torch tensor and threads",
        "import torch\nt = torch.ones(300, 300); s = (t @ t).sum().item()",
        "(t @ t).sum().item() == s",
        Same(),
        ("torch",),
    ),
    Row(
        "torch seeded",
        "import torch\ntorch.manual_seed(1);",
        "torch.rand(1).item()",
        Same(),
        ("torch",),
    ),
    Row(
        "opencv",
        "import cv2, numpy as np\n"
        "a = np.zeros((50, 50, 3), np.uint8); cv2.GaussianBlur(a, (5, 5), 0).shape",
        "cv2.GaussianBlur(a, (5, 5), 0).shape",
        Same(),
        ("cv2",),
    ),
    Row(
        "SQLAlchemy",
        "import sqlalchemy as sa\n"
        "e = sa.create_engine('sqlite://', poolclass=sa.pool.StaticPool); c = e.connect(); "
        "c.execute(sa.text('create table t (x)'));",
        "c.execute(sa.text('select count(*) from t')).scalar()",
        Same(),
        ("sqlalchemy",),
    ),
    Row("httpx client", "import httpx\nc = httpx.Client()", "c.is_closed", Same(), ("httpx",)),
    Row(
        "lxml tree",
        "from lxml import etree\nt = etree.fromstring('<a><b/></a>')",
        "t[0].tag",
        Same(),
        ("lxml",),
    ),
    Row(
        "networkx graph",
        "import networkx as nx\ng = nx.path_graph(4)",
        "nx.shortest_path_length(g, 0, 3)",
        Same(),
        ("networkx",),
    ),
    Row(
        "dask, threads",
        "import dask\nd = dask.delayed(sum)([1, 2]); d.compute()",
        "d.compute(scheduler='threads')",
        Same(),
        ("dask",),
    ),
    Row(
        "Pillow image",
        "from PIL import Image\ni = Image.new('RGB', (4, 4), 'red')",
        "i.getpixel((1, 1))",
        Same(),
        ("PIL",),
    ),
    Row(
        "sympy expression",
        "import sympy\nx = sympy.Symbol('x'); e = (x + 1) ** 2",
        "str(sympy.expand(e))",
        Same(),
        ("sympy",),
    ),
]


class Objects(unittest.TestCase):
    """Each row begins in a copy of one fresh session, so that rows do not affect each other."""

    def setUp(self) -> None:
        self._base = Runner()
        self.addCleanup(self._base.close)
        self._fresh = self._base.branch()
        self._forks = _can_mount()

    def test_the_table_has_all_kinds_and_each_once(self) -> None:
        kinds = [row.kind for row in (*_PLAIN, *_THREADS, *_PACKAGES)]
        self.assertEqual(len(kinds), len(set(kinds)))
        self.assertGreaterEqual(len(kinds), 114)

    def test_objects_of_python_and_the_system(self) -> None:
        self.check_all(_PLAIN)

    @unittest.skipUnless(threads._get_machine_code(), "skipped: needs x86-64 and the GNU C library")
    def test_objects_with_threads(self) -> None:
        self.check_all(_THREADS)

    @unittest.skipUnless(threads._get_machine_code(), "skipped: needs x86-64 and the GNU C library")
    def test_objects_of_packages(self) -> None:
        self.check_all(_PACKAGES)

    def check_all(self, rows: list[Row]) -> None:
        for row in rows:
            with self.subTest(row.kind):
                missing = [name for name in row.needs if find_spec(name) is None]
                if missing:
                    self.skipTest(f"skipped: needs {', '.join(missing)}")
                self.check(row)

    def check(self, row: Row) -> None:
        with contextlib.ExitStack() as ending:
            source = self._fresh.spawn(b"u")
            ending.callback(_end, source)
            setup = source.run(row.setup)
            self.assertEqual(setup.done["status"], "ok", setup.error)
            checkpoint = source.branch(fork=True)
            copies = []
            if self._forks:
                copies.append(("fork", checkpoint.spawn(b"f")))
                ending.callback(_end, copies[-1][1])
            told = _said(source.run(row.use))
            if not (isinstance(row.expected, Fails) and not row.expected.exceptions):
                self.assertFalse(told.startswith("raised"), f"in the source: {told}")
            _end(source)
            copies.append(("undo", checkpoint.spawn(b"u")))
            ending.callback(_end, copies[-1][1])
            for place, copy in copies:
                lost = ", ".join([*checkpoint.lost, *copy.hello["lost"]])
                self.compare(row.expected, place, told, _said(copy.run(row.use)), lost)

    def compare(
        self, expected: Same | New | Fails, place: str, source: str, copy: str, lost: str
    ) -> None:
        if isinstance(expected, Fails) and not (expected.only_fork and place == "undo"):
            self.assertIn(expected.told, lost, place)
            if expected.exceptions:
                names = [f"raised {name}" for name in expected.exceptions]
                self.assertTrue(copy.startswith(tuple(names)), f"{place}: {copy}")
            else:
                self.assertNotEqual(copy, source, place)
            return
        if isinstance(expected, New):
            self.assertFalse(copy.startswith("raised"), f"{place}: {copy}")
            self.assertNotEqual(copy, source, place)
        else:
            self.assertEqual(copy, source, f"{place}, lost: {lost}")
        is_told = isinstance(expected, Same) and not (expected.only_fork and place == "undo")
        told = expected.told if is_told else ""
        self.assertEqual(bool(lost), bool(told), f"{place}: {lost}")
        self.assertIn(told, lost, place)


def _said(result: Result) -> str:
    """Returns the result of a use: its output and value, or the name of the exception."""
    if result.error is not None:
        return f"raised {result.error['name']}: {result.error['message']}"
    return "\n".join(result.order)


def _end(copy: Copy) -> None:
    """Ends a copy and all processes that it has started, as a sandbox does. Calling it twice is
    allowed."""
    ended = [copy.number] if copy._channel.fileno() >= 0 else []
    processes = []
    for number in ended:
        with contextlib.suppress(OSError):
            processes.append(os.pidfd_open(number))
            for children in Path(f"/proc/{number}/task").glob("*/children"):
                ended.extend(map(int, children.read_text().split()))
    # Children first: one that watches its parent, such as the tracker of shared memory, must not
    # see it end. Then all are waited for, because a process holds its locks until it is gone.
    for process in reversed(processes):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
    for process in processes:
        select.select([process], [], [], TIMEOUT)
        os.close(process)
    copy.hang_up()


if __name__ == "__main__":
    unittest.main()
