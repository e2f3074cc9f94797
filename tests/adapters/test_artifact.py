"""Reading adapter directories, hostile ones included."""

import os
import socket
from pathlib import Path

import pytest

from loraplex.adapters import AdapterLimits, Artifact, read_artifact
from loraplex.core import AdapterRefused

from .factories import write_adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def refusal(directory: Path, limits: AdapterLimits | None = None) -> AdapterRefused:
    with pytest.raises(AdapterRefused) as caught:
        read_artifact(directory, limits or AdapterLimits())
    return caught.value


def read(directory: Path) -> Artifact:
    return read_artifact(directory, AdapterLimits())


def test_both_files_are_read_whole(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    artifact = read(tmp_path)
    assert artifact.config == (tmp_path / CONFIG).read_bytes()
    assert artifact.weights == (tmp_path / WEIGHTS).read_bytes()
    assert artifact.weights.readonly


@pytest.mark.parametrize(("name", "code"), [(CONFIG, "CONFIG_MISSING"), (WEIGHTS, "WEIGHTS_MISSING")])
def test_missing_file_is_refused(tmp_path: Path, name: str, code: str) -> None:
    (write_adapter(tmp_path) / name).unlink()
    assert refusal(tmp_path).reason_code == code


def test_missing_directory_is_said_not_to_exist(tmp_path: Path) -> None:
    assert refusal(tmp_path / "gone").message == f"The adapter directory '{tmp_path / 'gone'}' does not exist."


@pytest.mark.parametrize("name", ["nowhere", "nul\0byte"])
def test_missing_directory_is_refused(tmp_path: Path, name: str) -> None:
    assert refusal(tmp_path / name).reason_code == "CONFIG_MISSING"


@pytest.mark.parametrize("suffix", ["bin", "pt", "ckpt"])
def test_only_pickled_weights_are_refused_unopened(tmp_path: Path, suffix: str) -> None:
    (write_adapter(tmp_path) / WEIGHTS).unlink()
    os.mkfifo(tmp_path / f"adapter_model.{suffix}")  # opening it would block
    assert refusal(tmp_path).reason_code == "WEIGHTS_UNSAFE_FORMAT"


def test_pickled_weights_beside_safetensors_are_ignored(tmp_path: Path) -> None:
    os.mkfifo(write_adapter(tmp_path) / "adapter_model.bin")
    read(tmp_path)


@pytest.mark.parametrize(("name", "code"), [(CONFIG, "CONFIG_MISSING"), (WEIGHTS, "WEIGHTS_MISSING")])
@pytest.mark.parametrize("kind", ["fifo", "directory", "socket", "dangling", "loop"])
def test_what_is_no_regular_file_is_refused_without_hanging(
    tmp_path: Path, name: str, code: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_adapter(tmp_path) / name
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        monkeypatch.chdir(tmp_path)  # socket paths may be short only
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(name)
    else:
        path.symlink_to("nowhere" if kind == "dangling" else name)
    assert refusal(tmp_path).reason_code == code


def test_device_behind_a_link_is_an_escape(tmp_path: Path) -> None:
    path = write_adapter(tmp_path) / WEIGHTS
    path.unlink()
    path.symlink_to("/dev/zero")
    assert refusal(tmp_path).reason_code == "PATH_ESCAPE"


def test_link_out_of_the_directory_is_refused_without_showing_the_file(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter") / WEIGHTS
    path.unlink()
    (tmp_path / "secret.txt").write_text("CANARY")
    path.symlink_to("../secret.txt")
    error = refusal(tmp_path / "adapter")
    assert error.reason_code == "PATH_ESCAPE"
    assert "CANARY" not in error.message


def test_link_to_a_sibling_with_a_longer_name_is_an_escape(tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter-two")
    path = write_adapter(tmp_path / "adapter") / WEIGHTS
    path.unlink()
    path.symlink_to(f"../adapter-two/{WEIGHTS}")
    assert refusal(tmp_path / "adapter").reason_code == "PATH_ESCAPE"


def test_link_inside_the_directory_and_link_to_the_directory_are_followed(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "real") / WEIGHTS
    path.rename(path.with_name("other"))
    path.symlink_to("other")
    (tmp_path / "link").symlink_to("real")
    assert read(tmp_path / "link") == read(tmp_path / "real")


def make_cache(root: Path, subfolder: str = "") -> Path:
    """A snapshot as huggingface_hub lays it out, files as links into blobs."""
    blobs = write_adapter(root / "blobs")
    snapshot = root / "snapshots" / "0123abcd" / subfolder
    snapshot.mkdir(parents=True)
    for name in (CONFIG, WEIGHTS):
        (snapshot / name).symlink_to(os.path.relpath(blobs / name, snapshot))
    return snapshot


@pytest.mark.parametrize("subfolder", ["", "adapters/one"])
def test_hub_cache_snapshot_is_followed(tmp_path: Path, subfolder: str) -> None:
    read(make_cache(tmp_path / "models--org--adapter", subfolder))


def test_hub_cache_snapshot_may_not_reach_another_repository(tmp_path: Path) -> None:
    snapshot = make_cache(tmp_path / "models--org--adapter")
    write_adapter(tmp_path / "models--org--other" / "blobs")
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).symlink_to(f"../../../models--org--other/blobs/{WEIGHTS}")
    assert refusal(snapshot).reason_code == "PATH_ESCAPE"


def test_snapshots_folder_outside_a_hub_cache_gives_no_right(tmp_path: Path) -> None:
    assert refusal(make_cache(tmp_path / "anything")).reason_code == "PATH_ESCAPE"


def test_sparse_terabyte_is_refused_by_size(tmp_path: Path) -> None:
    os.truncate(write_adapter(tmp_path) / WEIGHTS, 2**40)
    error = refusal(tmp_path)
    assert error.reason_code == "TOO_LARGE"
    assert str(2**40) in error.message


def test_size_limits_name_value_and_limit(tmp_path: Path) -> None:
    size = (write_adapter(tmp_path) / WEIGHTS).stat().st_size
    error = refusal(tmp_path, AdapterLimits(max_bytes=size - 1))
    assert error.reason_code == "TOO_LARGE"
    assert str(size) in error.message
    assert str(size - 1) in error.message
    read_artifact(tmp_path, AdapterLimits(max_bytes=size))
    os.truncate(tmp_path / CONFIG, 2**20 + 1)
    assert refusal(tmp_path).subject == CONFIG


def test_file_cut_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_adapter(tmp_path)
    monkeypatch.setattr(os, "readv", lambda fd, buffers: 0)
    assert refusal(tmp_path).reason_code == "CONFIG_MISSING"
