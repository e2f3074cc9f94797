"""The flags of `loraplex serve` about callers, the registry and the port; and whole servers."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from loraplex.cli.launch import Launched
from loraplex.cli.listen import close_all
from loraplex.cli.serve_settings import (
    engine_config,
    host_adapter_bytes,
    host_memory_warning,
    open_port,
    preload_config,
    registry_config,
    runtime_roots,
    start_modules,
)
from loraplex.core import ConfigError
from loraplex.engine.config import EngineConfig
from loraplex.registry import Registry, RegistryConfig, Role
from loraplex.server.preloading import PreloadConfig

from ..conftest import MakeAdapter, MakeBase

REGISTRY = RegistryConfig(Path("data"))
COMMAND = [sys.executable, "-c", "from loraplex.cli.main import main; main()", "serve"]


def clean_environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LORAPLEX_", "VLLM_"))}
    return {**kept, **extra}


def refusal(*argv: str, base: Path | str = "nowhere", **environment: str) -> str:
    """What `serve` says when it refuses its flags; where the base does not exist, they are looked at first."""
    command = [*COMMAND, str(base), "--port", "0", *argv]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=clean_environment(**environment)
    )
    assert done.returncode == 2, done.stderr
    return done.stderr


# ---------------------------------------------------------------------- the port
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_loopback_needs_no_key(host: str) -> None:
    close_all(open_port(host, 0, None, None, is_insecure=False))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_other_addresses_need_a_registry_a_key_or_the_flag(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_port(host, 0, None, None, is_insecure=False)
    for way_out in ("--data-dir", "--api-key", "--host 127.0.0.1", "--insecure-no-auth"):
        assert way_out in caught.value.message
    close_all(open_port(host, 0, "sk-0123456789", None, is_insecure=False))
    close_all(open_port(host, 0, None, REGISTRY, is_insecure=False))
    close_all(open_port(host, 0, None, None, is_insecure=True))


def test_the_flag_contradicts_what_asks_for_keys() -> None:
    for key, registry, flag in (("sk-0123456789", None, "--api-key"), (None, REGISTRY, "--data-dir")):
        with pytest.raises(ConfigError, match=flag):
            open_port("127.0.0.1", 0, key, registry, is_insecure=True)


# ---------------------------------------------------------------------- the registry
def test_places_of_a_registry_need_its_data_directory() -> None:
    assert registry_config(None, None, None, None) is None
    for url, bucket, flag in (("postgresql://x/y", None, "--database-url"), (None, "s3://x", "--artifacts-url")):
        with pytest.raises(ConfigError, match=flag):
            registry_config(None, url, bucket, None)


def test_the_highest_rank_holds_for_what_is_published_too(tmp_path: Path) -> None:
    config = registry_config(tmp_path, "postgresql://x/y", "s3://x", 16)
    assert config is not None
    assert (config.data_dir, config.database_url, config.artifacts_url) == (tmp_path, "postgresql://x/y", "s3://x")
    assert config.adapter_limits.max_rank == 16


def test_adapters_by_flag_are_refused_beside_a_registry_with_the_way_to_publish() -> None:
    with pytest.raises(
        ConfigError, match="loraplex adapter add adapters/sql --tenant TENANT --name sql --base BASE --data-dir data"
    ):
        start_modules(["sql=adapters/sql"], REGISTRY)
    assert start_modules(None, REGISTRY) == []
    assert [module.name for module in start_modules(["a=1", "b=2"], None)] == ["a", "b"]


def test_a_key_by_flag_is_refused_beside_a_registry(tmp_path: Path) -> None:
    assert "--api-key has no place" in refusal("--data-dir", str(tmp_path), "--api-key", "sk-0123456789")


def test_a_key_in_the_environment_is_for_other_commands_and_said_to_be_unused(tmp_path: Path) -> None:
    said = refusal("--data-dir", str(tmp_path), LORAPLEX_API_KEY="sk-canary-0123456789")
    assert "note: LORAPLEX_API_KEY is not used" in said
    assert "sk-canary" not in said
    assert "CONFIG_MISSING" in said  # it went on to the base


# ---------------------------------------------------------------------- loading at run time
def test_loading_at_run_time_is_off_unless_a_root_is_named(tmp_path: Path) -> None:
    assert runtime_roots(False, None) is None
    with pytest.raises(ConfigError, match="needs at least one --lora-root"):
        runtime_roots(True, None)
    with pytest.raises(ConfigError, match="no effect"):
        runtime_roots(False, [tmp_path])
    with pytest.raises(ConfigError, match="is not a directory"):
        runtime_roots(True, [tmp_path / "nowhere"])
    (tmp_path / "link").symlink_to(tmp_path)
    assert runtime_roots(True, [tmp_path / "link"]) == (tmp_path.resolve(),)


@pytest.mark.parametrize("value", ["1", "true", "True"])
def test_the_variable_of_vllm_is_known(value: str) -> None:
    assert "--lora-root" in refusal(VLLM_ALLOW_RUNTIME_LORA_UPDATING=value)


def test_memory_for_adapters_is_given_or_a_quarter_of_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_adapter_bytes("3G") == 3 * 2**30
    with pytest.raises(ConfigError, match="--cpu-lora-memory"):
        host_adapter_bytes("much")
    for available, expected in ((80, 20), (None, 4 * 2**30)):
        monkeypatch.setattr("loraplex.engine.host_memory.available_memory", lambda found=available: found)
        assert host_adapter_bytes(None) == expected


def launched_with(host_bytes: int | None) -> Launched:
    """A server with a pool of 1 MiB."""
    geometry = SimpleNamespace(num_pages=256, page_bytes=4096)
    engine = SimpleNamespace(engine=SimpleNamespace(arena=SimpleNamespace(max_bytes=host_bytes)))
    return cast(Launched, SimpleNamespace(base=SimpleNamespace(geometry=geometry), engine=engine))


@pytest.mark.parametrize(("host_bytes", "is_told"), [(None, False), (2**20, False), (2**20 - 1, True)])
def test_host_memory_that_holds_less_than_the_pool_is_told(host_bytes: int | None, is_told: bool) -> None:
    warning = host_memory_warning(launched_with(host_bytes))
    assert (warning is not None) == is_told
    assert warning is None or all(part in warning for part in ("--cpu-lora-memory", "1 MiB"))


def test_host_memory_beyond_what_the_system_has_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.engine.host_memory.available_memory", lambda: 24 * 2**30)
    assert host_memory_warning(launched_with(24 * 2**30)) is None
    warning = host_memory_warning(launched_with(900 * 2**30))
    assert warning is not None
    assert all(part in warning for part in ("--cpu-lora-memory", "900 GiB", "24 GiB"))
    monkeypatch.setattr("loraplex.engine.host_memory.available_memory", lambda: None)
    assert host_memory_warning(launched_with(900 * 2**30)) is None


def test_host_memory_without_room_for_any_adapter_is_refused(tiny_base: MakeBase) -> None:
    said = refusal("--cpu-lora-memory", "1", base=tiny_base("llama"))
    assert all(part in said for part in ("error config_error", "--cpu-lora-memory of 1 B", "a page of the pool")), said


@pytest.mark.parametrize(("flag", "value"), [("--max-cpu-loras", "1"), ("--packed-cache-size", "1G")])
def test_flags_of_a_registry_are_refused_without_one(flag: str, value: str, tmp_path: Path) -> None:
    assert all(part in refusal(flag, value) for part in (f"{flag} {value}", "--data-dir"))
    assert "CONFIG_MISSING" in refusal(flag, value, "--data-dir", str(tmp_path)), "it went on to the base"


# ---------------------------------------------------------------------- from end to end
@contextmanager
def serving(base: Path, *argv: str) -> Iterator[tuple[str, list[str]]]:
    """A server process: its URL, and what it has said; stopped at the end, which must be clean."""
    command = [*COMMAND, str(base), "--port", "0", "--memory", "8M", "--num-threads", "1", *argv]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=clean_environment()) as process:
        assert process.stderr is not None
        said: list[str] = []
        for line in process.stderr:
            said.append(line)
            if '"event": "ready"' in line:
                break
        try:
            assert said, "it said nothing"
            ready = json.loads(said[-1])["message"]
            assert ready.startswith("Ready"), said
            yield ready.split(": ")[1].split(" ")[0].removesuffix("/v1"), said
        finally:
            process.send_signal(signal.SIGINT)
            said += process.stderr.readlines()
        assert process.wait(30) == 0


def call(url: str, key: str | None, body: dict[str, object] | None = None) -> tuple[int, dict[str, object]]:
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def pool_of(url: str, key: str) -> list[tuple[str, bool]]:
    """State of each adapter and whether it is pinned, when no more come without a request."""
    deadline = time.monotonic() + 20
    while True:
        states = [
            (one["state"], one["is_pinned"])
            for one in call(f"{url}/admin/v1/residency", key)[1]["adapters"]  # type: ignore[attr-defined]
        ]
        if [state for state, _ in states] == ["resident"] * 2 or time.monotonic() > deadline:
            return sorted(states)
        time.sleep(0.05)


def test_a_server_with_a_registry_answers_each_caller_with_its_own(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter, tmp_path: Path
) -> None:
    from loraplex.cli.admin_client import LocalBase
    from loraplex.cli.local_client import describe

    base = tiny_base("llama")
    description = describe(LocalBase(base))
    with Registry(RegistryConfig(tmp_path / "data")) as registry:
        operator = registry.local_operator()
        keys = {}
        for tenant, seed in (("acme", 1), ("globex", 2)):
            registry.tenants.create(operator, tenant)
            keys[tenant] = registry.keys.create(operator, tenant, Role.TENANT).key.reveal()
            adapter = tiny_adapter(base, seed=seed)
            version = registry.publish(operator, tenant, "one", adapter, description, base_unverified=True)
            registry.adapters.skip_verification(operator, tenant, "one", version.number)
            registry.adapters.activate(operator, tenant, "one", version.number, expected=None)
        chief = registry.keys.create(operator, "acme", Role.OPERATOR).key.reveal()
    body: dict[str, object] = {"model": "one", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
    early = ("--pin", "acme/one", "--preload", "globex/one", "--preload-recent", "3", "--cpu-lora-memory", "4M")
    with serving(base, "--data-dir", str(tmp_path / "data"), *early) as (url, said):
        assert pool_of(url, chief) == [("resident", False), ("resident", True)]
        assert "with a registry of 2 tenants with 2 active adapters" in said[-1]
        assert any("--cpu-lora-memory keeps 4 MiB" in line and "hold 7.99 MiB" in line for line in said), said
        assert call(f"{url}/v1/completions", None, body)[0] == 401
        digests = set()
        for key in keys.values():
            status, answer = call(f"{url}/v1/completions", key, body)
            assert status == 200, answer
            digests.add(answer["x_loraplex"]["adapter"]["digest"])  # type: ignore[index]
        assert len(digests) == 2
    lines = [json.loads(line) for line in said]  # all of them
    requests = [line for line in lines if line["event"] == "request"]
    asked = [line["tenant"] for line in requests if line["tenant"] is None or line["requested_model"] == "one"]
    assert asked == [None, "acme", "globex"]
    assert not any(key in line for line in said for key in keys.values())
    recent = json.loads((tmp_path / "data" / "recent-adapters.json").read_text())
    assert recent["scores"].keys() == {"acme/one", "globex/one"}


def test_adapters_are_loaded_at_run_time_from_below_the_roots(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter, tmp_path: Path
) -> None:
    base = tiny_base("llama")
    (tmp_path / "root").mkdir()
    shutil.copytree(tiny_adapter(base), tmp_path / "root/one")
    shutil.copytree(tiny_adapter(base), tmp_path / "outside")
    flags = ("--allow-runtime-lora-updating", "--lora-root", str(tmp_path / "root"))
    with serving(base, *flags) as (url, _):
        for path, status in (("outside", 404), ("root/one", 200)):
            body = json.dumps({"lora_name": "one", "lora_path": str(tmp_path / path)}).encode()
            request = urllib.request.Request(f"{url}/v1/load_lora_adapter", body, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=30) as reply:
                    assert (reply.status, reply.read()) == (status, b"Success: LoRA adapter 'one' added successfully.")
            except urllib.error.HTTPError as error:
                assert error.code == status
        assert call(f"{url}/v1/models/one", None)[0] == 200


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("LORAPLEX_DATABASE_URL", "postgresql://u:canary@h/d", "--database-url is for a registry"),
        ("LORAPLEX_ARTIFACTS_URL", "s3://canary/x", "--artifacts-url is for a registry"),
    ],
)
def test_places_of_a_registry_come_from_the_environment_too(name: str, value: str, words: str) -> None:
    said = refusal(**{name: value})
    assert words in said
    assert "canary" not in said


def test_a_server_without_a_registry_says_so(tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> None:
    base = tiny_base("llama")
    with serving(base, "--lora-modules", f"one={tiny_adapter(base)}") as (url, said):
        assert "with 1 adapters, no registry" in said[-1]
        costs = [json.loads(line)["message"] for line in said if '"event": "cost_model"' in line]
        assert len(costs) == 1
        assert costs[0].startswith("A step takes max(")
        assert call(f"{url}/v1/models/one", None)[0] == 200


def test_a_name_to_pin_or_preload_that_does_not_exist_is_one_line(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter
) -> None:
    base = tiny_base("llama")
    command = [*COMMAND, str(base), "--port", "0", "--memory", "8M", "--num-threads", "1", "--preload", "two"]
    command += ["--lora-modules", f"one={tiny_adapter(base)}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=clean_environment())
    assert done.returncode == 2
    assert done.stderr.endswith("error config_error: --preload two: The model 'two' does not exist.\n")


def test_what_the_last_run_used_is_kept_in_the_data_directory_only() -> None:
    assert preload_config(["a/b"], None, 0, None) == PreloadConfig(pin=("a/b",))
    assert preload_config(None, ["a/b"], 2, Path("data")).recent_path == Path("data/recent-adapters.json")
    with pytest.raises(ConfigError, match="--preload-recent needs --data-dir"):
        preload_config(None, None, 2, None)


def test_settings_of_the_engine_are_the_flags_of_their_names() -> None:
    flags = {"memory": "2M", "enable_prefix_caching": False, "max_loras": 3, "dtype": "float32", "host": "x"}
    expected = EngineConfig(memory_bytes=2**21, prefix_caching=False, max_loras=3, dtype="float32")
    assert engine_config(flags) == expected


def test_a_registry_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    said = refusal("--data-dir", str(tmp_path / "file"))
    assert said.startswith("error config_error: The data directory")
