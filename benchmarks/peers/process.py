"""An engine in a process of its own, as `compare.py` holds it: started, asked line by line, stopped while others are asked, and ended."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from driver import Ask, CannotError, Setting, Told
from environments import CrashedError, PeerError

START_SECONDS = ANSWER_SECONDS = 900


class EngineProcess:
    """A driver's process. Between asks it can be frozen, so that nothing that it does in the background takes a core from another."""

    def __init__(self, name: str, command: Sequence[str], setting: Setting, log: Path, variables: Mapping[str, str] | None = None) -> None:
        """Starts it and waits until it is ready.

        Raises:
            PeerError: It does not start; says what it said last.
        """
        self.name, self._log = name, log
        self._unread = b""
        threads = {name: str(setting.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        ours = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}  # peers are compiled where they lie
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [*command, json.dumps(asdict(setting))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=ours | threads | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} | dict(variables or {}),
                start_new_session=True,
            )
        try:
            self.about: str = self._read(START_SECONDS)["ready"]
        except PeerError:
            self.close()
            raise

    def ask(self, ask: Ask) -> tuple[float, Told]:
        """Returns the seconds that it took, by its own clock, and the answers.

        Raises:
            PeerError: It ended, or took too long.
            CannotError: It has no such thing.
        """
        try:
            self._process.stdin.write((json.dumps(asdict(ask)) + "\n").encode())
            self._process.stdin.flush()
        except OSError as error:
            raise self._ended() from error
        told = self._read(ANSWER_SECONDS)
        if "cannot" in told:
            raise CannotError(told["cannot"])
        return told.pop("seconds"), Told(**told)

    def _read(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise PeerError(f"it said nothing for {seconds:.0f} s")
                piece = os.read(self._process.stdout.fileno(), 1 << 16)
                if not piece:
                    raise self._ended()
                self._unread += piece
        line, self._unread = self._unread.split(b"\n", 1)
        return json.loads(line)

    def _ended(self) -> PeerError:
        code = self._process.wait(20)
        said = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        words = " ".join(said[-1:])[:300]
        return CrashedError(f"killed by {signal.Signals(-code).name}; {words}") if code < 0 else PeerError(f"it ended: {words}")

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Lets it run inside, and freezes it afterwards."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def forget_peak(self) -> None:
        """Begins the peak of its memory anew."""
        for process in self._family():
            try:
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")
            except OSError:  # ended meanwhile, or a kernel without it: then the peak is that since the start
                continue

    def peak_bytes(self) -> int:
        """Largest resident memory since `forget_peak`, children included."""
        total = 0
        for process in self._family():
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                continue
            total += next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)
        return total

    def _family(self) -> list[psutil.Process]:
        try:
            own = psutil.Process(self._process.pid)
            return [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Ends it and whatever it started."""
        self._signal(signal.SIGCONT)
        with suppress(OSError):  # it may have ended with a question half read
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
