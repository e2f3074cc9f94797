"""Putting the rooms together: a base, its adapters, an engine and an HTTP app."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from loraplex.cli.progress import progress_bar
from loraplex.cli.say import say
from loraplex.cli.sizes import format_size
from loraplex.cli.sweeping import PeriodicSweep
from loraplex.core import AdapterRefused, ConfigError, ServerError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from loraplex.adapters import CatalogEntry
    from loraplex.engine import AsyncEngine, EngineConfig, LoadedBase, ServedModels
    from loraplex.engine.packed_files import PackedFiles
    from loraplex.pool import PoolGeometry
    from loraplex.registry import Registry, RegistryConfig
    from loraplex.server import ServerConfig


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter to load at start: its name and its directory."""

    name: str
    path: Path


def parse_lora_module(text: str) -> LoraModule:
    """`name=path`, or vLLM's JSON form {"name": ..., "path": ...}. Raises ConfigError."""
    if text.lstrip().startswith("{"):
        return _module_of_json(text)
    name, separator, path = text.partition("=")
    if not separator or not name or not path:
        raise ConfigError(f"--lora-modules {text!r:.200} is not name=path.")
    return LoraModule(name, Path(path))


def _module_of_json(text: str) -> LoraModule:
    """`base_model_name` is vLLM's and not used: the adapter is checked against the base that is served."""
    try:
        fields = json.loads(text)
        module = LoraModule(str(fields["name"]), Path(fields["path"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'--lora-modules {text!r:.200} is not JSON with "name" and "path".') from error
    unknown = sorted(fields.keys() - {"name", "path", "base_model_name"})
    if unknown:
        raise ConfigError(
            f"--lora-modules of {module.name!r:.80} has the key {unknown[0]!r:.80}; "
            "known are name, path and base_model_name."
        )
    return module


@dataclass(frozen=True, slots=True)
class Launched:
    """A server ready to run. With a `registry`, `models` has no names."""

    app: "FastAPI"
    engine: "AsyncEngine"
    models: "ServedModels"
    base: "LoadedBase"
    started_s: float = field(default_factory=time.monotonic)
    registry: "Registry | None" = None
    sweep: PeriodicSweep | None = None

    def close(self) -> None:
        """End the engine's thread and close the registry."""
        self.engine.stop()
        if self.sweep is not None:
            self.sweep.close()
        if self.registry is not None:
            self.registry.close()


def launch(
    base_dir: Path,
    modules: list[LoraModule],
    engine_config: "EngineConfig",
    server_config: "ServerConfig",
    console: Console,
    name: str | None = None,
    registry_config: "RegistryConfig | None" = None,
    packed_bytes: int = 0,
) -> Launched:
    """Load everything and start the engine's thread. Raises BaseRefused, AdapterRefused or ConfigError.

    With a registry, `packed_bytes` of packed adapters are kept in its data directory.
    """
    started_s = time.monotonic()
    registry = None if registry_config is None else open_registry(registry_config, console)
    try:
        packed = None
        if registry_config is not None and packed_bytes > 0:
            packed = partial(_packed_files, registry_config, packed_bytes)
        return _launch(base_dir, modules, engine_config, server_config, console, name, registry, packed, started_s)
    except BaseException:
        if registry is not None:
            registry.close()
        raise


def open_registry(config: "RegistryConfig", console: Console) -> "Registry":
    """The registry, with its store swept. Raises ConfigError if it cannot be opened."""
    from loraplex.registry import Registry

    try:
        registry = Registry(config)
    except ServerError as error:
        raise ConfigError(f"The registry cannot be opened (--data-dir, --database-url): {error.message}") from error
    try:
        registry.sweep()
    except ServerError as error:  # old files stay a while longer, which harms nobody
        say(console, f"warning: files that no adapter needs were not removed: {error.message}", style="yellow")
    return registry


def _launch(
    base_dir: Path,
    modules: list[LoraModule],
    engine_config: "EngineConfig",
    server_config: "ServerConfig",
    console: Console,
    name: str | None,
    registry: "Registry | None",
    open_packed: "Callable[[LoadedBase], PackedFiles] | None",
    started_s: float,
) -> Launched:
    with progress_bar(console, "Loading weights") as progress:
        progress(0, 1)
        from loraplex.adapters import AdapterLimits
        from loraplex.engine import AsyncEngine, Engine, ServedModels, load_base
        from loraplex.server import create_app

        base = load_base(base_dir, engine_config, name=name, progress=progress)
    check_host_bytes(server_config.host_adapter_bytes, base.geometry)
    with progress_bar(console, "Capturing CUDA graphs") as progress:
        packed = None if open_packed is None else open_packed(base)
        engine = Engine(base, progress=progress, max_host_bytes=server_config.host_adapter_bytes, packed_files=packed)
    engine.calibrate()
    models = ServedModels(engine, AdapterLimits(max_rank=engine_config.max_lora_rank))
    with progress_bar(console, "Loading adapters") as progress:
        for done, module in enumerate(modules, start=1):
            _load_adapter(models, module)
            progress(done, len(modules))
    for entry in models.catalog.list():
        warning = base_warning(entry, base.description.name, base_dir)
        if warning is not None:
            say(console, warning, style="yellow")
    client = AsyncEngine(engine)
    app = create_app(client, models if registry is None else registry, server_config)
    app.state.service.preloader.check_start()
    client.start()
    sweep = None if registry is None else PeriodicSweep(registry, packed)
    return Launched(app, client, models, base, started_s, registry, sweep)


def check_host_bytes(host_bytes: int, geometry: "PoolGeometry") -> None:
    """Raise ConfigError for host memory that holds no adapter of this base, whatever its rank."""
    if host_bytes < geometry.page_bytes:
        raise ConfigError(
            f"--cpu-lora-memory of {format_size(host_bytes)} holds no adapter: of this base each takes at least a page "
            f"of the pool, {format_size(geometry.page_bytes)}. Raise --cpu-lora-memory."
        )


def _packed_files(config: "RegistryConfig", max_bytes: int, base: "LoadedBase") -> "PackedFiles":
    """Packed adapters in a registry's data directory. Raises ConfigError."""
    from loraplex.engine.packed_files import PackedFiles, packing_stamp

    stamp = packing_stamp(base.description.sites, base.geometry, base.decoder.dtype, config.adapter_limits)
    return PackedFiles(config.data_dir / "packed", max_bytes, stamp)


def _load_adapter(models: "ServedModels", module: LoraModule) -> None:
    """Load one of several; a refusal names which. Raises AdapterRefused."""
    try:
        models.load(module.name, module.path, created=time.time())
    except AdapterRefused as error:
        message = f"--lora-modules {module.name}={module.path}: {error.message}"
        raise AdapterRefused(error.reason, message, error.subject) from error


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].casefold()


def _directory_name(base_dir: Path) -> str:
    """The model's name in a directory's path, also in Hugging Face's cache: models--<org>--<name>/snapshots/<hash>."""
    path = base_dir.resolve()
    return path.parent.parent.name.rpartition("--")[2] if path.parent.name == "snapshots" else path.name


def base_warning(entry: "CatalogEntry", served_name: str, base_dir: Path) -> str | None:
    """A line for an adapter whose config names another base than the one served; None when it names it, or none.

    Only the last part of the names is compared, without case: it proves nothing, so nothing is refused.
    """
    declared = entry.declared_base
    known = {_last_part(served_name), _directory_name(base_dir).casefold()}
    if declared is None or _last_part(declared) in known:
        return None
    return (
        f"warning: adapter {entry.ref.name} says it was trained on {declared!r:.200}, and {served_name!r:.200} is "
        "served: base unverified."
    )


def cost_line(launched: Launched) -> str:
    """One line that says what a step takes here, and how that is known."""
    calibrator, target_ms = launched.engine.engine.scheduler.costs, launched.base.config.tpot_target_ms
    target = "" if target_ms is None else f"; --tpot-target-ms {target_ms:g} bounds ranks and prompts by this"
    known = "measured now" if calibrator.is_measured else "assumed at first"
    costs = calibrator.model
    return (
        f"A step takes max({costs.fixed_ms:.3g}, {costs.token_ms:.3g} * tokens) + {costs.kv_token_ms:.3g} * KV tokens "
        f"+ {costs.rank_ms:.3g} * ranks ms, {known} and corrected by every step{target}"
    )


_TYPICAL_CONTEXT = 512  # tokens of a sequence, where a target is judged


def target_warning(launched: Launched) -> str | None:
    """A line for a `--tpot-target-ms` that cannot be kept here once all seats are taken; None where it can.

    It is no error: it rests on a measurement of a moment.
    """
    from loraplex.scheduler import StepShape

    scheduler = launched.engine.engine.scheduler
    target_ms, costs = scheduler.config.tpot_target_ms, scheduler.costs.model
    if target_ms is None:
        return None
    context, seats = min(_TYPICAL_CONTEXT, scheduler.config.max_model_len), scheduler.config.max_num_seqs
    without_ms = costs.step_ms(StepShape(seats, seats * context, 0.0))
    longest_ms = without_ms + costs.rank_ms * costs.max_ranks(target_ms, seats, seats * context)
    if not longest_ms > target_ms * 1.001:
        return None
    return (
        f"warning: --tpot-target-ms {target_ms:g} cannot always be kept: a step of {seats} sequences (--max-num-seqs) "
        f"of {context} tokens takes {without_ms:.3g} ms here without an adapter and may take {longest_ms:.3g} ms with, "
        "as adapters always get a tenth more; raise the target or lower --max-num-seqs."
    )


def ready_line(launched: Launched, host: str, port: int) -> str:
    """One line that says what is served, where, and how long it took."""
    base, geometry = launched.base, launched.base.geometry
    seconds = time.monotonic() - launched.started_s
    pool = format_size(geometry.num_pages * geometry.page_bytes)
    dtype = str(base.decoder.dtype).removeprefix("torch.")
    address = f"[{host}]" if ":" in host else host
    return (
        f"Ready in {seconds:.1f} s: http://{address}:{port}/v1 serves {base.description.name} "
        f"({base.description.fingerprint[:12]}, {dtype}) with {_models_note(launched)}; "
        f"pool {pool} = {geometry.num_pages} pages of {geometry.page_tokens} tokens; kernels: {base.kernels}"
    )


def _models_note(launched: Launched) -> str:
    """Whose adapters there are."""
    if launched.registry is None:
        return f"{len(launched.models.catalog.list())} adapters, no registry"
    counts = launched.registry.tenants.count(launched.registry.local_operator())
    return f"a registry of {counts.tenants} tenants with {counts.adapters} active adapters"
