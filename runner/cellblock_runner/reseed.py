"""Reseed: fresh randomness after a fork.

Two processes forked from one warm process begin with the same memory, and so with the same "random"
numbers. Sources that draw from the kernel each time (secrets, uuid4, numpy's default_rng when it
creates a generator) are safe; sources that keep a state for the whole process are reseeded here. A
generator that the user keeps in a variable or has seeded (`seeds`) belongs to the user, and
continues where it was. OpenSSL is the dangerous one: it detects a fork only by the process id, and
ids repeat in different process namespaces.

Nothing is imported here: a module that is not loaded has no state yet.
"""

from __future__ import annotations

import os
import sys

from .seeds import is_seeded, share


def reseed() -> None:
    """Reseeds every source of randomness that this process has loaded. Must be called in the child
    after every fork.
    """
    share(None)
    random = sys.modules.get("random")
    if random is not None and not is_seeded("random"):
        random.seed()

    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None and not is_seeded("numpy.random"):
        # With a single number of our own: for several, or for seeding itself, numpy touches four
        # times as much shared memory.
        numpy_random.mtrand._rand.seed(int.from_bytes(os.urandom(4), "little"))

    ssl = sys.modules.get("ssl") or sys.modules.get("_ssl")
    if ssl is not None:
        ssl.RAND_add(os.urandom(64), 64.0)

    tempfile = sys.modules.get("tempfile")
    if tempfile is not None:
        tempfile._name_sequence = None

    synchronize = sys.modules.get("multiprocessing.synchronize")
    if synchronize is not None and tempfile is not None:
        synchronize.SemLock._rand = tempfile._RandomNameSequence()

    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)

    uuid = sys.modules.get("uuid")
    if uuid is not None:
        # Without a network card the node number of uuid1 is random, drawn once.
        uuid._node = None
        uuid._last_timestamp = None

    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "seed") and not is_seeded("torch.random"):
        torch.seed()
