"""What `loraplex serve` makes of its flags about callers, adapters and the port, before anything is loaded."""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from loraplex.cli.launch import Launched, LoraModule, parse_lora_module
from loraplex.cli.listen import bind_sockets, close_all
from loraplex.cli.say import say
from loraplex.cli.sizes import format_size, parse_size
from loraplex.core import ConfigError

if TYPE_CHECKING:
    from loraplex.engine import EngineConfig
    from loraplex.registry import RegistryConfig
    from loraplex.server import ServerConfig
    from loraplex.server.preloading import PreloadConfig

_DEFAULT_HOST_BYTES = 4 * 2**30  # where the system does not say how much memory there is


def host_adapter_bytes(given: str | None) -> int:
    """Bytes for adapters in host memory. Raises ConfigError."""
    if given is not None:
        return parse_size(given, "--cpu-lora-memory")
    from loraplex.engine.host_memory import available_memory

    available = available_memory()
    return _DEFAULT_HOST_BYTES if available is None else max(1, available // 4)


def host_memory_warning(launched: Launched) -> str | None:
    """A line for host memory in which fewer adapters fit than in the pool, or more than the system has; else None."""
    from loraplex.engine.host_memory import available_memory

    geometry, host_bytes = launched.base.geometry, launched.engine.engine.arena.max_bytes
    pool_bytes, available = geometry.num_pages * geometry.page_bytes, available_memory()
    if host_bytes is None:
        return None
    if available is not None and host_bytes > available:
        return (
            f"warning: --cpu-lora-memory is {format_size(host_bytes)}, and this process may still use "
            f"{format_size(available)}: the system may end it when adapters fill more. Lower --cpu-lora-memory."
        )
    if host_bytes >= pool_bytes:
        return None
    return (
        f"warning: --cpu-lora-memory keeps {format_size(host_bytes)} of adapters in host memory, and the pool could "
        f"hold {format_size(pool_bytes)}: what leaves host memory leaves the pool too, so adapters never fill more of "
        "the pool than that. Raise --cpu-lora-memory where there is memory."
    )


def check_registry_flags(context: typer.Context, data_dir: Path | None) -> None:
    """Raise ConfigError for a flag that does nothing without a registry, where there is none."""
    for name in ("max_cpu_loras", "packed_cache_size"):
        source = context.get_parameter_source(name)
        if data_dir is None and source is not None and source.name == "COMMANDLINE":
            flag, value = "--" + name.replace("_", "-"), context.params[name]
            raise ConfigError(f"{flag} {value} is for adapters of a registry, which needs --data-dir.")


def engine_config(flags: Mapping[str, Any]) -> "EngineConfig":
    """The engine's settings: flags of their names, and two that are called otherwise. Raises ConfigError."""
    from loraplex.engine.config import EngineConfig

    memory = flags["memory"]
    renamed = {
        "memory_bytes": None if memory is None else parse_size(memory, "--memory"),
        "prefix_caching": flags["enable_prefix_caching"],
    }
    known = {field.name for field in fields(EngineConfig)}
    return EngineConfig(**{name: value for name, value in flags.items() if name in known}, **renamed)


def preload_config(
    pin: Sequence[str] | None, preload: Sequence[str] | None, num_recent: int, data_dir: Path | None
) -> "PreloadConfig":
    """Adapters that come without a request. Raises ConfigError."""
    from loraplex.server.preloading import PreloadConfig

    recent_path = None if data_dir is None else data_dir / "recent-adapters.json"
    return PreloadConfig(tuple(pin or ()), tuple(preload or ()), num_recent, recent_path)


def server_config(
    key: str | None,
    max_adapters: int | None,
    memory: str | None,
    roots: tuple[Path, ...] | None,
    public_metrics: bool,
    preloads: "PreloadConfig",
) -> "ServerConfig":
    """What the HTTP server may do. Raises ConfigError."""
    from loraplex.server import ServerConfig

    return ServerConfig(
        key,
        max_host_adapters=max_adapters,
        host_adapter_bytes=host_adapter_bytes(memory),
        adapter_roots=roots,
        public_metrics=public_metrics,
        preloads=preloads,
    )


def registry_config(
    data_dir: Path | None, database_url: str | None, artifacts_url: str | None, max_rank: int | None
) -> "RegistryConfig | None":
    """Where the registry is; None if there shall be none. Raises ConfigError for a place without a data directory."""
    if data_dir is None:
        for flag, value in (("--database-url", database_url), ("--artifacts-url", artifacts_url)):
            if value is not None:
                raise ConfigError(f"{flag} is for a registry, which needs --data-dir too.")
        return None
    from loraplex.adapters import AdapterLimits
    from loraplex.registry import RegistryConfig

    return RegistryConfig(data_dir, database_url, artifacts_url, adapter_limits=AdapterLimits(max_rank=max_rank))


def usable_key(
    context: typer.Context, api_key: str | None, registry: "RegistryConfig | None", console: Console
) -> str | None:
    """The one key of a server without a registry. Raises ConfigError if it was asked for beside a registry."""
    if api_key is None or registry is None:
        return api_key
    source = context.get_parameter_source("api_key")
    if source is None or source.name != "ENVIRONMENT":
        raise ConfigError("--api-key has no place beside a registry (--data-dir): every caller has a key of its own.")
    say(console, "note: LORAPLEX_API_KEY is not used: with a registry every caller has a key of its own.", "yellow")
    return None


def start_modules(words: Sequence[str] | None, registry: "RegistryConfig | None") -> list[LoraModule]:
    """The adapters of --lora-modules. Raises ConfigError, also if there is a registry, which has its own."""
    modules = [parse_lora_module(word) for word in words or ()]
    if modules and registry is not None:
        module = modules[0]
        raise ConfigError(
            "--lora-modules has no place beside a registry (--data-dir): adapters there belong to tenants. Publish it: "
            f"loraplex adapter add {module.path} --tenant TENANT --name {module.name} --base BASE --data-dir "
            f"{registry.data_dir}"
        )
    return modules


def runtime_roots(is_allowed: bool, roots: Sequence[Path] | None) -> tuple[Path, ...] | None:
    """Where adapters may be loaded from at run time; None if not at all. Raises ConfigError."""
    if not is_allowed:
        if roots:
            raise ConfigError("--lora-root has no effect without --allow-runtime-lora-updating.")
        return None
    if not roots:
        raise ConfigError(
            "--allow-runtime-lora-updating (VLLM_ALLOW_RUNTIME_LORA_UPDATING) needs at least one --lora-root: adapters "
            "are loaded from below these directories only."
        )
    from loraplex.server import check_roots

    return check_roots(roots)


def open_port(
    host: str, port: int, key: str | None, registry: "RegistryConfig | None", is_insecure: bool
) -> list[socket]:
    """Bound sockets. Raises ConfigError if whoever reaches them could use everything, unless that was asked for."""
    if is_insecure and (registry is not None or key is not None):
        other = "--data-dir" if registry is not None else "--api-key"
        raise ConfigError(f"--insecure-no-auth contradicts {other}; give one of them.")
    sockets = bind_sockets(host, port)
    if registry is None and key is None and not is_insecure and not all(map(_is_loopback, sockets)):
        close_all(sockets)
        raise ConfigError(
            f"--host {host} can be reached from other machines, and nothing would ask callers for a key. Give "
            "--data-dir (a registry with keys for each tenant), --api-key (one key), --host 127.0.0.1, or "
            "--insecure-no-auth."
        )
    return sockets


def _is_loopback(one: socket) -> bool:
    return ipaddress.ip_address(str(one.getsockname()[0]).partition("%")[0]).is_loopback
