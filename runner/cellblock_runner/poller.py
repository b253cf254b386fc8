"""Poller: waits for descriptors, and calls the handler of each that is ready."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from socket import socket

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Poller:
    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def listen(self, descriptor: int, handler: Callable[[], object]) -> None:
        """Calls the handler whenever there is something to read. Replaces an earlier handler."""
        self.watch(descriptor, READ, handler)

    def watch(self, descriptor: int | socket, events: int, handler: Callable[[], object]) -> None:
        self.ignore(descriptor)
        if events:
            self._selector.register(descriptor, events, handler)

    def ignore(self, descriptor: int | socket) -> None:
        """Removes the handler, if there is one."""
        try:
            self._selector.unregister(descriptor)
        except (KeyError, ValueError):
            pass

    def wait(self, pause: float | None) -> None:
        """Waits until something is ready, at most for the pause, and calls the handlers."""
        for key, _ in self._selector.select(pause):
            # An earlier handler may have closed it, and its descriptor number may be in use again.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
