"""Where a worker runs: in a thread of this process, or in a process of its own. Messages go both ways; nothing else is shared.

A worker never outlives the process that started it. A forked child has no worker: it gives back its copies of the pipes.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from agentrt.config import EngineConfig
from agentrt.errors import EngineError, UserError

Message = tuple[Any, ...]
Receive = Callable[[Message], None]

#: Seconds that a worker may take to end when it is closed, before it is killed.
CLOSE_SECONDS = 10.0

#: Looks at a barrier before a thread of the worker's sleeps. Beside nothing else 500 are as good as 5,000; beside a busy process fewer are better.
SPINS = "500"

_log = logging.getLogger("agentrt")


class Host(Protocol):
    """Where the worker runs."""

    def post(self, message: Message) -> None:
        """Sends the worker a message; from any thread.

        Raises:
            EngineError: It is gone.
            UserError: Something in the message means nothing there.
        """
        ...

    def close(self) -> None:
        """Ends the worker, and waits until it has ended."""
        ...


class ThreadHost:
    """A worker in a thread of this process: for notebooks and tests. Its deltas come on that thread."""

    THREAD = "agentrt-engine"

    def __init__(self, config: EngineConfig, folder: Path, receive: Receive) -> None:
        """Starts it.

        Args:
            config: The engine's.
            folder: The model's.
            receive: Called with each message.
        """
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(config, folder, receive), name=self.THREAD, daemon=True)
        self._thread.start()

    def _run(self, config: EngineConfig, folder: Path, receive: Receive) -> None:
        try:
            from agentrt.engine import worker  # torch comes with it

            worker.start(worker.WorkerOrder(config, folder), self._inbox, receive)
        except BaseException as error:  # a library in Rust that panics raises one that is no Exception
            receive(("failed", EngineError(f"the engine's thread ended: {error!r}")))
        receive(("failed", EngineError("the engine was shut down")))

    def post(self, message: Message) -> None:
        """Sends the worker a message."""
        self._inbox.put(message)

    def close(self) -> None:
        """Ends the thread."""
        self._inbox.put(("close",))
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_SECONDS)


class ProcessHost:
    """A worker in a process of its own, so that nothing in this one can stall its steps."""

    THREAD = "agentrt-deltas"

    def __init__(self, config: EngineConfig, folder: Path, receive: Receive) -> None:
        """Starts it.

        Args:
            config: The engine's.
            folder: The model's.
            receive: Called with each message, on a thread of this host's.
        """
        child_read, parent_write = os.pipe()
        parent_read, child_write = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            # -P: the folder that we happen to be in is no place for the worker to import from
            [sys.executable, "-P", "-m", "agentrt.engine", str(child_read), str(child_write)],
            pass_fds=(child_read, child_write),
            stdin=subprocess.DEVNULL,
            stderr=self._errors,
            env=_environment(),
        )
        os.close(child_read)
        os.close(child_write)
        self._owner = os.getpid()
        self._writer = Connection(parent_write, readable=False)
        self._reader = Connection(parent_read, writable=False)
        self._lock = threading.RLock()
        self._outbox: list[bytes] = []  # what the thread that holds the lock has to write
        # The order's class lives beside torch, which this process need not have; the worker's own module makes it.
        self.post((config, folder))
        self._thread = threading.Thread(target=self._read, args=(receive,), name=self.THREAD, daemon=True)
        self._thread.start()
        _hosts.add(self)

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    def post(self, message: Message) -> None:
        """Sends the worker a message."""
        whole = _pickled(message)
        try:
            with self._lock:
                self._write(whole)
        except OSError as error:
            raise EngineError(f"the engine's process is gone{self._last_words()}") from error

    def _write(self, whole: bytes) -> None:
        """Writes, unless this thread is in the middle of that: a lost stream aborts its request wherever memory is collected."""
        self._outbox.append(whole)
        if len(self._outbox) > 1:
            return  # it goes when the one before it is whole
        try:
            while self._outbox:
                self._writer.send_bytes(self._outbox[0])
                del self._outbox[0]
        finally:
            self._outbox.clear()

    def _read(self, receive: Receive) -> None:
        try:
            while True:
                message = self._reader.recv()
                if message[0] == "ready" and (said := self._said()):  # that there are no native kernels, say: nobody else hears it
                    _log.warning("the engine's process said:\n%s", said)
                receive(message)
        except (EOFError, OSError):
            reason = f"the engine's process ended with status {self._process.wait()}{self._last_words()}"
        except Exception as error:
            reason = f"a message from the engine's process could not be read: {error!r}"
        receive(("failed", EngineError(reason)))

    def _said(self) -> str:
        """The end of what the process wrote for people; read where it lies, since the place of the next line is the process' own."""
        try:
            file = self._errors.fileno()
            return os.pread(file, 2000, max(os.fstat(file).st_size - 2000, 0)).decode(errors="replace").strip()
        except ValueError:  # closed
            return ""

    def _last_words(self) -> str:
        said = self._said()
        return f"; its last words were:\n{said}" if said else ""

    def close(self) -> None:
        """Ends the process; in a forked child, which has none, does nothing."""
        if os.getpid() != self._owner:
            return
        if threading.current_thread() is self._thread:  # called by a sink: who reads must go on reading
            threading.Thread(target=self._close, name="agentrt-close").start()
        else:
            self._close()

    def _close(self) -> None:
        try:
            self.post(("close",))
            self._process.wait(CLOSE_SECONDS)
        except (EngineError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._thread.join(CLOSE_SECONDS)
        self.release()

    def release(self) -> None:
        """Gives back this process's ends of the pipes."""
        self._writer.close()
        self._reader.close()
        self._errors.close()


class _Pickler(pickle.Pickler):
    """Writes what a process that lacks our caller's modules can read: numbers and text of a class of their own (an `IntEnum`, say) become plain ones."""

    _KNOWN = sys.stdlib_module_names | {"agentrt"}
    _PLAIN: tuple[type, ...] = (int, float, str, bytes)

    def reducer_override(self, value: Any) -> Any:
        """Asked for everything but plain values and containers."""
        kind = value if isinstance(value, type) else type(value)
        if kind.__module__.partition(".")[0] in self._KNOWN:
            return NotImplemented
        for plain in self._PLAIN:
            if isinstance(value, plain):
                return plain, plain.__getnewargs__(value)  # type: ignore[attr-defined]
        raise UserError(f"a {kind.__module__}.{kind.__qualname__} means nothing to the engine's process; give plain numbers, text, or lists and dicts of them")


def _pickled(message: Message) -> bytes:
    whole = io.BytesIO()
    _Pickler(whole, pickle.HIGHEST_PROTOCOL).dump(message)
    return whole.getvalue()


_hosts: weakref.WeakSet[ProcessHost] = weakref.WeakSet()


def _in_forked_child() -> None:
    """A child that held the pipes open would keep the worker alive after its parent."""
    for host in list(_hosts):
        host.release()


os.register_at_fork(after_in_child=_in_forked_child)


def _environment() -> dict[str, str]:
    """The worker's environment: ours, the same modules, and threads that wait for each other as is best for steps.

    A step has hundreds of barriers. OpenMP's threads spin at each for milliseconds by default: where anything else wants a core, the one
    spun for never runs, and a step takes ten times as long. If they slept at once, waking them, in a virtual machine above all, would take
    as long again as the step does. So they spin for some ten microseconds, which is how long most waits are, and then sleep. Whoever sets
    one of these variables has the say.
    """
    modules = os.pathsep.join(path for path in sys.path if path)
    waits = {} if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ) else {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": SPINS}
    return {**waits, **os.environ, "PYTHONPATH": modules}
