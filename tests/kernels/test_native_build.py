"""Where the native library is kept."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.kernels.native import NativeUnavailable, build


@pytest.fixture(autouse=True)
def quick_build(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Any processor will do and compiling writes an empty file; private folders are removed."""
    made: list[str] = []
    make = tempfile.mkdtemp

    def mkdtemp(*args: str, **options: str) -> str:
        made.append(make(*args, **options))
        return made[-1]

    monkeypatch.setattr(build, "cpu_flags", lambda: build.REQUIRED_CPU_FLAGS)
    monkeypatch.setattr(build, "find_compiler", lambda: "/bin/true")
    monkeypatch.setattr(build, "_compile", lambda compiler, folder, target: target.write_bytes(b""))
    monkeypatch.setattr(build.tempfile, "mkdtemp", mkdtemp)
    build._private_folder.cache_clear()
    yield
    build._private_folder.cache_clear()
    for path in made:
        shutil.rmtree(path)


def test_library_is_kept_in_the_cache_folder(tmp_path: Path) -> None:
    path = build.build_library(tmp_path / "new" / "cache")
    assert path.parent == tmp_path / "new" / "cache"
    assert path.exists()
    assert build.build_library(tmp_path / "new" / "cache") == path


def test_cache_folder_that_cannot_be_made_is_replaced_by_a_private_one() -> None:
    cache = Path("/proc/nope/native")
    path = build.build_library(cache)
    assert path.is_relative_to(tempfile.gettempdir())
    assert path.parent.stat().st_mode & 0o077 == 0
    assert build.build_library(cache) == path


def test_no_place_at_all_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nope")
    with pytest.raises(NativeUnavailable, match="XDG_CACHE_HOME") as caught:
        build.build_library(Path("/proc/nope/native"))
    assert "/proc/nope/native" in str(caught.value)
