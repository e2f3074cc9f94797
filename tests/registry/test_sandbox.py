"""Validation in a child process (RELIABILITY.md, T01): limits, crashes, and what reaches the child."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters import AdapterLimits, load_adapter
from loraplex.core import AdapterRefused, ConfigError
from loraplex.registry import SandboxLimits, ValidatorFailed, sandbox, validate_in_subprocess
from loraplex.registry.blobs import StagedBlob, hash_blob
from loraplex.registry.changes import no_step
from loraplex.registry.directory_store import DirectoryStore
from tests.adapters.factories import make_config, make_tensors, write_adapter, write_safetensors

from .helpers import BASE, adapter_dir, bad_adapter_dir

LIMITS = AdapterLimits(max_rank=8)
SANDBOX = SandboxLimits()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirectoryStore]:
    store = DirectoryStore(tmp_path / "artifacts", no_step)
    yield store
    store.close()


def stage(store: DirectoryStore, directory: Path) -> tuple[StagedBlob, StagedBlob]:
    config = (directory / "adapter_config.json").read_bytes()
    return store.stage(config), store.stage((directory / "adapter_model.safetensors").read_bytes())


def validate(store: DirectoryStore, directory: Path, limits: SandboxLimits = SANDBOX) -> Any:
    return validate_in_subprocess(*stage(store, directory), BASE, LIMITS, limits)


def use_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """Another program in place of the child."""
    (tmp_path / "child.py").write_text(code)
    monkeypatch.setattr(sandbox, "_CHILD", tmp_path / "child.py")


def test_it_finds_what_loading_finds(store: DirectoryStore, tmp_path: Path) -> None:
    directory = adapter_dir(tmp_path, base_model_name_or_path="some/base")
    facts, adapter = validate(store, directory), load_adapter(directory, BASE, LIMITS)
    assert (facts.digest, facts.max_rank, facts.num_bytes, facts.targets, facts.declared_base) == (
        adapter.digest,
        adapter.max_rank,
        adapter.num_bytes,
        adapter.targets,
        "some/base",
    )


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_child_knows_the_whole_base(store: DirectoryStore, tmp_path: Path, has_bias: bool) -> None:
    """`bias: all` is plain LoRA on a base without biases only."""
    base = replace(BASE, sites=tuple(replace(site, has_bias=has_bias) for site in BASE.sites))
    staged = stage(store, adapter_dir(tmp_path, bias="all"))
    if not has_bias:
        assert validate_in_subprocess(*staged, base, LIMITS, SANDBOX).max_rank > 0
        return
    with pytest.raises(AdapterRefused, match="bias"):
        validate_in_subprocess(*staged, base, LIMITS, SANDBOX)


def refusal(store: DirectoryStore, directory: Path) -> AdapterRefused:
    with pytest.raises(AdapterRefused) as caught:
        validate(store, directory)
    return caught.value


def test_refusals_come_through_with_reason_and_subject(store: DirectoryStore, tmp_path: Path) -> None:
    refused = refusal(store, bad_adapter_dir(tmp_path))
    assert refused.reason_code == "NONFINITE"
    assert refused.subject is not None
    assert refused.subject in refused.message
    large = write_adapter(tmp_path / "large", make_config(r=9), make_tensors(rank=9))
    assert refusal(store, large).reason_code == "RANK_TOO_LARGE"
    assert refusal(store, write_adapter(tmp_path / "junk", b"{")).reason_code == "CONFIG_INVALID"


class Canary:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_pickles_in_disguise_are_refused_and_run_nothing(store: DirectoryStore, tmp_path: Path) -> None:
    import io
    import pickle
    import tarfile
    import zipfile

    canary = tmp_path / "canary"
    pickles = [pickle.dumps(Canary(canary), protocol) for protocol in range(6)]
    zipped, tarred = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("archive/data.pkl", pickles[2])
    with tarfile.open(fileobj=tarred, mode="w") as tar:
        tar.addfile(info := tarfile.TarInfo("model.pkl"), io.BytesIO(pickles[2]))
        info.size = len(pickles[2])
    shapes = [*pickles, zipped.getvalue(), tarred.getvalue(), b"\x93NUMPY" + pickles[0], b"\x89HDF\r\n" + pickles[1]]
    shapes += [len(shape).to_bytes(8, "little") + shape for shape in pickles]  # as the header of a safetensors file
    refused = 0
    for number, data in enumerate(shapes):
        directory = write_adapter(tmp_path / f"pickle-{number}")
        (directory / "adapter_model.safetensors").write_bytes(data)
        refused += refusal(store, directory).reason_code in ("WEIGHTS_UNSAFE_FORMAT", "WEIGHTS_CORRUPT")
    assert refused == len(shapes) >= 16
    assert not canary.exists()
    pickle.loads(pickles[4])
    assert canary.exists()  # the canary works


# ---------------------------------------------------------------------- limits
def test_memory_is_limited(store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = (sandbox._CHILD).read_text()
    hungry = child.replace("    config, weights = (", "    bytearray(2**30)\n    config, weights = (")
    assert hungry != child
    use_child(monkeypatch, tmp_path, hungry)
    refused = refusal(store, adapter_dir(tmp_path))
    assert refused.reason_code == "TOO_LARGE"
    assert "memory_bytes" in refused.message
    use_child(monkeypatch, tmp_path, hungry.replace("    _limit(order)\n", "    pass\n"))
    validate(store, adapter_dir(tmp_path))  # the mutant: without the limit the memory is there


def test_processor_time_is_limited(store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = (sandbox._CHILD).read_text()
    use_child(monkeypatch, tmp_path, child.replace("    config, weights = (", "    while True: pass\n    config = ("))
    with pytest.raises(AdapterRefused, match=r"1 s of processor time.*cpu_s") as caught:
        validate(store, adapter_dir(tmp_path), SandboxLimits(cpu_s=1))
    assert caught.value.reason_code == "TOO_LARGE"


def test_wall_time_is_limited_and_the_child_is_gone(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    sleeper = f"import os, pathlib, time\npathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\ntime.sleep(600)\n"
    use_child(monkeypatch, tmp_path, sleeper)
    started = time.monotonic()
    with pytest.raises(AdapterRefused, match="wall_s"):
        validate(store, adapter_dir(tmp_path), SandboxLimits(wall_s=0.5))
    assert time.monotonic() - started < 10
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize("limits", [{"memory_bytes": 1}, {"cpu_s": 0}, {"wall_s": 0}, {"wall_s": float("nan")}])
def test_limits_that_cannot_work_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(limits))):
        SandboxLimits(**limits)


# ---------------------------------------------------------------------- a child that fails or lies
@pytest.mark.parametrize(
    "code",
    [
        "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
        "raise SystemExit(3)",
        "raise ValueError",
        "",
        "print('[]')",
        "print('{}')",
        'print(\'{"refused": "NO_SUCH_REASON", "message": "x"}\')',
        'print(\'{"digest": "../../etc", "max_rank": 1, "num_bytes": 1, "targets": [], "declared_base": null}\')',
        "print('x' * (2**20 + 10))",
        "import sys\nsys.stdout.buffer.write(b'\\x80\\x04.')",
    ],
)
def test_a_child_without_a_proper_answer_is_a_failure(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    use_child(monkeypatch, tmp_path, code)
    with pytest.raises(ValidatorFailed):
        validate(store, adapter_dir(tmp_path))


def test_a_signal_is_named(store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_child(monkeypatch, tmp_path, "import os\nos.abort()")
    with pytest.raises(ValidatorFailed, match=f"signal {int(signal.SIGABRT)}"):
        validate(store, adapter_dir(tmp_path))


def test_it_checks_the_bytes_that_will_be_published(store: DirectoryStore, tmp_path: Path) -> None:
    config, weights = stage(store, adapter_dir(tmp_path))
    weights.path.write_bytes(write_safetensors(make_tensors(rank=3)))
    with pytest.raises(ValidatorFailed, match="status 3"):
        validate_in_subprocess(config, weights, BASE, LIMITS, SANDBOX)


def test_the_child_gets_no_environment_and_no_files(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    seen = tmp_path / "seen"
    code = (
        "import json, os, pathlib\n"
        "fds = sorted(int(fd) for fd in os.listdir('/proc/self/fd'))\n"
        f"pathlib.Path({str(seen)!r}).write_text(json.dumps([dict(os.environ), fds]))\n"
    )
    use_child(monkeypatch, tmp_path, code)
    secret = os.open(adapter_dir(tmp_path) / "adapter_config.json", os.O_RDONLY)
    os.set_inheritable(secret, True)
    try:
        with pytest.raises(ValidatorFailed):
            validate(store, adapter_dir(tmp_path))
    finally:
        os.close(secret)
    environment, fds = json.loads(seen.read_text())
    assert set(environment) <= {
        "PYTHONPATH",
        "PYTHONDONTWRITEBYTECODE",
        "OPENBLAS_NUM_THREADS",
        "OMP_NUM_THREADS",
        "LC_CTYPE",
    }
    assert len(fds) == 4  # standard streams and the listing itself


def test_the_child_does_not_import_the_registry(tmp_path: Path) -> None:
    code = "import sys, runpy\nsys.modules['sqlalchemy'] = sys.modules['torch'] = None\n"
    code += f"runpy.run_path({str(sandbox._CHILD)!r})\nimport loraplex.adapters\n"
    code += "assert 'loraplex.registry' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_staged_files_are_named_by_their_hash(store: DirectoryStore) -> None:
    assert store.stage(b"x").ref == hash_blob(b"x")
