"""Byte automata on disk: what was compiled ahead of time, found again by content. Bounded; the longest unused go first.

An automaton over bytes belongs to no tokenizer, so one file serves every model. A file that cannot be read counts as
absent; nothing in it is executed. A schema that is found here takes the automaton without being asked to: both engines
give the same masks, so that changes only how long they take.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import zipfile
import zlib
from functools import lru_cache
from pathlib import Path

import numpy as np
import platformdirs

from agentrt import __version__
from agentrt.grammar.regex_fsm import ByteAutomaton
from agentrt.request import GrammarSpec

#: Bytes that the folder may hold.
MAX_BYTES = 256_000_000
#: Changes when what is stored means something else, or when another version reads schemas otherwise.
_FORM = f"2 {__version__}"


def default_folder() -> Path:
    """The folder "grammars" of agentrt's cache, which `AGENTRT_HOME` moves."""
    return _folder_under(os.environ.get("AGENTRT_HOME"))


@lru_cache(maxsize=4)  # asked for with every schema
def _folder_under(home: str | None) -> Path:
    return (Path(home).expanduser() if home else Path(platformdirs.user_cache_dir("agentrt", appauthor=False))) / "grammars"


class AutomatonStore:
    """A folder of automata, each named by the digest of what it was compiled from."""

    def __init__(self, folder: Path | None = None, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder or default_folder()
        self._max_bytes = max_bytes

    def path_of(self, spec: GrammarSpec) -> Path:
        """The file of a constraint's automaton, there or not."""
        content = f"{_FORM}:{spec.kind}:{spec.options}:{spec.source}"
        digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
        return self._folder / f"{digest[:40]}.npz"

    def load(self, spec: GrammarSpec) -> ByteAutomaton | None:
        """The automaton, if it is there and whole."""
        path = self.path_of(spec)
        if not path.exists():
            return None
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as kept:
                table, accepting, start = kept["table"], kept["accepting"], int(kept["start"])
            os.utime(path)
            return ByteAutomaton(table, accepting, start)
        except (OSError, ValueError, KeyError, EOFError, IndexError, zipfile.BadZipFile, zlib.error):
            return None

    def save(self, spec: GrammarSpec, automaton: ByteAutomaton) -> Path:
        """Keeps the automaton, and drops the longest unused ones beyond the bound."""
        path = self.path_of(spec)
        self._folder.mkdir(parents=True, exist_ok=True)
        full = automaton.table[:, automaton.columns]
        with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".part", delete=False) as file:
            try:
                np.savez_compressed(file, table=full, accepting=automaton.accepting, start=automaton.start)
                file.flush()
                os.replace(file.name, path)
            except BaseException:  # a full disk: what there is of it would stay for good
                os.unlink(file.name)
                raise
        self._shrink(path)
        return path

    def _shrink(self, newest: Path) -> None:
        files = sorted(self._folder.glob("*.npz"), key=lambda path: path.stat().st_mtime)
        total = sum(path.stat().st_size for path in files)
        for path in files:
            if total <= self._max_bytes:
                return
            if path != newest:
                total -= path.stat().st_size
                path.unlink(missing_ok=True)
