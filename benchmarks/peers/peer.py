"""Other engines, each in an environment of its own that is made on first use, each behind OpenAI's API, so that programs run on them as they are."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from environments import ENVIRONMENTS, LLAMACPP, OPENVINO, VLLM, Environment, PeerError
from float_copy import float_copy

from agentrt.hub import ModelFiles

HERE = Path(__file__).resolve().parent
START_SECONDS = 300


@dataclass(frozen=True)
class Peer:
    """Where it is installed, and how its server is started on a GGUF file, with a folder beside it that holds the tokenizer."""

    name: str
    environment: Environment
    command: tuple[str, ...]

    @contextmanager
    def serving(self, model: ModelFiles) -> Iterator[str]:
        """Starts the server on a model, yields its address, and ends it.

        Raises:
            PeerError: It cannot be installed, or does not start.
        """
        python, port = self.environment.python(), _free_port()
        words = {"{model}": str(model.gguf), "{port}": str(port), "{here}": str(HERE)}
        if "{float}" in self.command:
            words["{float}"] = str(float_copy(model))
        command = [str(python), *(_filled(part, words) for part in self.command)]
        log = ENVIRONMENTS / f"peer-{self.name}.log"
        with log.open("w") as out:
            server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | {"HF_HUB_OFFLINE": "1"} | self.environment.variables())
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
        Peer("openvino", OPENVINO, ("{here}/openvino_server.py", "{model}", "{port}")),
        Peer("guidance", LLAMACPP, ("{here}/guidance_server.py", "{model}", "{port}")),
        Peer(
            "vllm",
            VLLM,
            ("-m", "vllm.entrypoints.openai.api_server", "--model", "{float}", "--served-model-name", "model", "--port", "{port}",
             "--max-model-len", "8192", "--enable-prefix-caching", "--gpu-memory-utilization", "0.4"),
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
