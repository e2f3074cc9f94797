"""The secret file."""

import stat
import threading
from pathlib import Path

import pytest

from loraplex.core import ConfigError
from loraplex.registry.master_secret import FILE_NAME, MasterSecret, load_or_create_secret


def test_it_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    first, second = load_or_create_secret(tmp_path), load_or_create_secret(tmp_path)
    assert first.derive("x") == second.derive("x")
    assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_purposes_have_independent_keys_and_nothing_is_shown(tmp_path: Path) -> None:
    secret = load_or_create_secret(tmp_path)
    assert len({secret.derive("a"), secret.derive("b"), bytes.fromhex(secret.check_value)}) == 3
    assert (tmp_path / FILE_NAME).read_text().strip() not in repr(secret)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620])
def test_a_file_that_others_may_reach_is_refused(tmp_path: Path, mode: int) -> None:
    load_or_create_secret(tmp_path)
    (tmp_path / FILE_NAME).chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}"):
        load_or_create_secret(tmp_path)


@pytest.mark.parametrize("text", ["", "abc\n", "0" * 64, "0" * 63 + "G\n", "0" * 64 + "\n\n"])
def test_a_damaged_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    (tmp_path / FILE_NAME).chmod(0o600)
    with pytest.raises(ConfigError, match="damaged"):
        load_or_create_secret(tmp_path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    load_or_create_secret(tmp_path)
    (tmp_path / FILE_NAME).rename(tmp_path / "elsewhere")
    (tmp_path / FILE_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be opened"):
        load_or_create_secret(tmp_path)


def test_processes_that_start_at_once_agree(tmp_path: Path) -> None:
    made: list[MasterSecret] = []
    start = threading.Barrier(8)

    def load() -> None:
        start.wait()
        made.append(load_or_create_secret(tmp_path))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    assert len({secret.derive("x") for secret in made}) == 1
