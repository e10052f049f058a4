"""Native kernels are built once, share torch's threads, and their absence is no error."""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from agentrt.kernels.cpu import build

SOURCE = """
#include <omp.h>
extern "C" int team(int threads) {
    int size = 0;
    #pragma omp parallel num_threads(threads)
    #pragma omp single
    size = omp_get_num_threads();
    return size;
}
"""

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="no C++ compiler here")


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Sources, cache and memory of its own."""
    (tmp_path / "team.cpp").write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setenv("AGENTRT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("AGENTRT_NATIVE", raising=False)
    build.forget()
    yield
    build.forget()


@needs_compiler
def test_a_source_is_built_once_and_anew_when_it_changes(tmp_path, monkeypatch):
    library = build.load("team")
    assert isinstance(library, ctypes.CDLL)
    assert library.team(2) == 2
    assert build.load("team") is library
    folder = tmp_path / "home" / "kernels"
    (first,) = folder.glob("*.so")
    assert not list(folder.glob("*.partial*"))
    assert str(first) in build.built("team").found

    build.forget()
    with monkeypatch.context() as patch:
        patch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
        assert build.load("team").team(1) == 1
    build.forget()
    (tmp_path / "team.cpp").write_text(SOURCE.replace("omp_get_num_threads()", "-1"))
    assert build.load("team").team(1) == -1
    assert len(list(folder.glob("*.so"))) == 2


@needs_compiler
def test_a_library_that_was_cut_short_is_built_anew():
    path = build._library("team")
    path.write_bytes(path.read_bytes()[:100])
    assert build.load("team").team(2) == 2


@needs_compiler
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc here")
@pytest.mark.slow
def test_there_is_one_openmp_library_in_the_process(tmp_path):
    code = (
        "import sys, pathlib, torch\n"
        "from agentrt.kernels.cpu import build\n"
        f"build.SOURCES = pathlib.Path({str(tmp_path)!r})\n"
        "assert build.load('team').team(2) == 2\n"
        "maps = pathlib.Path('/proc/self/maps').read_text().split()\n"
        "print(*sorted({part for part in maps if 'omp' in pathlib.Path(part).name and '.so' in part}), sep='\\n')\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert len(out.split()) == 1, out


@pytest.mark.parametrize("trouble", ["no compiler", "broken source", "cache not writable", "switched off"])
def test_without_a_kernel_there_is_a_reason_said_once(trouble, tmp_path, monkeypatch, caplog):
    if trouble == "no compiler":
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CXX", raising=False)
    elif trouble == "broken source":
        (tmp_path / "team.cpp").write_text("no C++")
    elif trouble == "cache not writable":
        (tmp_path / "home").write_text("a file where the folder should be")
    else:
        monkeypatch.setenv("AGENTRT_NATIVE", "0")
    with caplog.at_level(logging.WARNING):
        assert build.load("team") is None
        build._built.cache_clear()
        assert build.load("team") is None
    assert len(caplog.records) == (0 if trouble == "switched off" else 1)
    assert "torch path runs" in build.built("team").found


@needs_compiler
def test_a_compiler_that_ran_out_of_time_is_asked_again(tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(build, "_SECONDS", 0.001)
        assert build.load("team") is None
    assert "was not done" in caplog.text
    assert build.load("team").team(1) == 1
    assert not list((tmp_path / "home" / "kernels").glob("*.partial*"))


@needs_compiler
def test_all_sources_are_built_side_by_side(tmp_path, monkeypatch):
    (tmp_path / "pair.cpp").write_text(SOURCE)
    compile_one, both = build._compile, threading.Barrier(2, timeout=120)

    def when_both_are_asked(*arguments):
        both.wait()
        compile_one(*arguments)

    monkeypatch.setattr(build, "_compile", when_both_are_asked)
    build.prepare()
    assert [build.load(name).team(1) for name in ("pair", "team")] == [1, 1]


def test_where_sources_were_not_installed_the_torch_path_runs(tmp_path):
    (tmp_path / "team.cpp").unlink()
    build.prepare()
    assert build.load("team") is None
