"""The engine's end of the connection to the API process, and the event that wakes its loop."""

from __future__ import annotations

import os
import socket
import threading

import msgspec

from cluster.frames import FrameError, Frames
from node_agent.ipc import Command, EngineEvent, command_decoder, encode

MAX_UNSENT = 64 << 20
"""Maximum bytes waiting for an API process that does not read."""


class Disconnected(Exception):
    """Raised when the API process is gone or does not read its messages."""


class Channel:
    """Non-blocking connection to the API process."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.connect(path)
        except OSError as error:
            self.socket.close()
            raise Disconnected(str(error)) from error
        self.socket.setblocking(False)
        self._frames = Frames()
        self._unsent = bytearray()

    @property
    def wants_write(self) -> bool:
        return bool(self._unsent)

    def receive(self) -> list[Command]:
        """Returns all commands that have arrived. Raises Disconnected."""
        commands: list[Command] = []
        while True:
            try:
                chunk = self.socket.recv(1 << 18)
            except BlockingIOError:
                return commands
            except OSError as error:
                raise Disconnected(str(error)) from error
            if not chunk:
                raise Disconnected("the API process closed the connection")
            try:
                for body in self._frames.feed(chunk):
                    commands += command_decoder.decode(body)
            except (FrameError, msgspec.DecodeError) as error:
                raise Disconnected(f"the API process broke the protocol: {error}") from error

    def send(self, events: list[EngineEvent]) -> None:
        """Queues the events as one frame and sends what the socket takes now. Raises Disconnected."""
        if events:
            self._unsent += encode(events)
        while self._unsent:
            try:
                sent = self.socket.send(memoryview(self._unsent)[: 1 << 18])
            except BlockingIOError:
                break
            except OSError as error:
                raise Disconnected(str(error)) from error
            del self._unsent[:sent]
        if len(self._unsent) > MAX_UNSENT:
            raise Disconnected("the API process does not read its messages")

    def close(self) -> None:
        self.socket.close()


class WakeUp:
    """Eventfd by which loader threads wake the engine's main loop. Some of these threads may outlive the engine."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.RLock()  # a signal handler may call `set` in the thread that is closing
        self._closed = False

    def set(self) -> None:
        """Wakes the main loop. Does nothing after `close`, when the descriptor's number may belong to another file."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return
