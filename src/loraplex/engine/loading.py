"""Bringing a base up: config, tokenizer, weights, pool sizes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from loraplex.core import BaseDescription, ConfigError
from loraplex.engine.config import GIB, EngineConfig
from loraplex.engine.host_memory import available_memory
from loraplex.engine.loads import LOADING_BYTES
from loraplex.engine.tokenizer import Tokenizer
from loraplex.kernels import choose_ops
from loraplex.model import (
    Checkpoint,
    Decoder,
    DecoderConfig,
    LoadOptions,
    describe_base,
    expected_tensors,
    list_sites,
    load_decoder,
    open_checkpoint,
)
from loraplex.pool import KvShape, PoolGeometry, ReloadCost, plan_geometry
from loraplex.scheduler import SchedulerConfig

Progress = Callable[[int, int], None]
"""Called with (layers loaded, layers in all)."""


@dataclass(frozen=True, slots=True)
class LoadedBase:
    """A base ready to serve, with every "auto" setting resolved."""

    description: BaseDescription
    config: EngineConfig
    decoder: Decoder
    checkpoint: Checkpoint  # of the weights that the decoder was made from
    tokenizer: Tokenizer
    geometry: PoolGeometry
    scheduler_config: SchedulerConfig
    kernels: str  # which operations run
    note: str | None  # why not the native ones


def resolve_device(config: EngineConfig) -> torch.device:
    """The device asked for; "auto" is a GPU where there is one. Raises ConfigError for one that is not there."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    index = torch.device("cuda" if config.device == "auto" else config.device).index or 0
    if index >= torch.cuda.device_count():
        message = f"device {config.device!r} is not there: torch sees {torch.cuda.device_count()} GPUs (--device)."
        raise ConfigError(message)
    return torch.device("cuda", index)


def _resolve_max_len(config: EngineConfig, model: DecoderConfig, geometry: PoolGeometry) -> int:
    """As asked, at most the model's context and what the pool holds; else the smaller of these. Raises ConfigError."""
    context, held = model.max_position_embeddings, geometry.num_pages * geometry.page_tokens
    if config.max_model_len is None:
        return min(context, held)
    if config.max_model_len > context:
        why = " (longrope is served up to its original length)" if model.rope.kind == "longrope" else ""
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds the base's context of {context} tokens{why} "
            "(--max-model-len)."
        )
    if config.max_model_len > held:
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds the {held} tokens of the pool ({geometry.num_pages} pages "
            f"of {geometry.page_tokens}): lower --max-model-len, or raise --kv-pages, --memory or, on a GPU without "
            "these, --gpu-memory-utilization."
        )
    return config.max_model_len


def _plan_pool(config: EngineConfig, model: DecoderConfig, dtype: torch.dtype, device: torch.device) -> PoolGeometry:
    kv = KvShape(model.num_layers, model.num_kv_heads, model.head_dim)
    widest = max(max(site.d_in, site.d_out) for site in list_sites(model))
    memory = config.memory_bytes
    if memory is None:
        memory = _left_on_gpu(config, model, dtype, device)
    geometry = plan_geometry(kv, widest, dtype.itemsize, num_pages=config.kv_pages, memory_bytes=memory)
    flag = "--memory" if config.kv_pages is None else "--kv-pages"
    if device.type == "cpu":
        _check_memory(geometry, flag)
    elif config.kv_pages is not None or config.memory_bytes is not None:
        _check_gpu_memory(geometry, flag, torch.cuda.mem_get_info(device)[0], _beside_pool(config, model, dtype))
    return geometry


def _check_gpu_memory(geometry: PoolGeometry, flag: str, free: int, beside: int) -> None:
    """Raise ConfigError for a pool that does not fit into what is free on a GPU, less what base and workspace take."""
    there_is = f"the GPU has {free / GIB:.4g} GiB free, of which base and workspace take {beside / GIB:.4g} GiB"
    _check_fits(geometry, flag, free - beside, there_is)


def _beside_pool(config: EngineConfig, model: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes that base and workspace take on a GPU."""
    weights = sum(math.prod(shape) for shape in expected_tensors(model).values()) * dtype.itemsize
    return weights + _workspace_bytes(config, model, dtype)


def _left_on_gpu(config: EngineConfig, model: DecoderConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes for the pool: the share of the GPU's memory that is ours, less what base, activations and graphs take."""
    free, total = torch.cuda.mem_get_info(device)
    beside = _beside_pool(config, model, dtype)
    left = int(total * config.gpu_memory_utilization) - (total - free) - beside
    if left <= 0 and config.kv_pages is None:
        raise ConfigError(
            f"{device} has {free / GIB:.4g} of {total / GIB:.4g} GiB free; base and workspace take "
            f"{beside / GIB:.4g} GiB, and nothing is left for the pool at gpu_memory_utilization "
            f"{config.gpu_memory_utilization} (--gpu-memory-utilization)."
        )
    return max(left, 0)


def _workspace_bytes(config: EngineConfig, model: DecoderConfig, dtype: torch.dtype) -> int:
    """Buffers of a step, its logits, and a fixed part for graphs, attention and the libraries."""
    assert config.max_num_batched_tokens is not None
    assert config.max_num_seqs is not None
    widths = 4 * model.hidden_size + 2 * (model.q_size + 2 * model.kv_size) + 5 * model.intermediate_size
    step = config.max_num_batched_tokens * widths * dtype.itemsize
    return 3 * GIB + step + 3 * config.max_num_seqs * model.vocab_size * 4


def _check_memory(geometry: PoolGeometry, flag: str) -> None:
    """Raise ConfigError for a pool that this machine cannot hold: found now, not when its pages are first written."""
    available = available_memory()
    if available is not None:
        _check_fits(geometry, flag, available, f"this process may still use {available / GIB:.4g} GiB")


def _check_fits(geometry: PoolGeometry, flag: str, left: int, there_is: str) -> None:
    """Raise ConfigError for a pool of more than `left` bytes; `there_is` says where that number comes from."""
    num_bytes = geometry.num_pages * geometry.page_bytes
    if num_bytes > left:
        raise ConfigError(
            f"The pool would take {num_bytes / GIB:.4g} GiB ({geometry.num_pages} pages of {geometry.page_bytes} "
            f"bytes); {there_is}. Lower {flag}."
        )


def _scheduler_config(config: EngineConfig, geometry: PoolGeometry, max_len: int, *, on_gpu: bool) -> SchedulerConfig:
    """What the scheduler needs of the settings. Costs only order what is evicted, so their size is enough."""
    assert config.max_num_batched_tokens is not None
    assert config.max_num_seqs is not None
    bytes_per_s, token_s = (5e10, 2e-5) if on_gpu else (5e9, 1e-3)
    return SchedulerConfig(
        max_model_len=max_len,
        max_step_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_mixed_tokens=config.max_num_mixed_tokens,
        max_loras=config.max_loras,
        load_ahead=True,
        max_load_pages=max(1, LOADING_BYTES // geometry.page_bytes),
        tpot_target_ms=config.tpot_target_ms,
        max_waiting_tokens=config.max_waiting_tokens,
        prefix_caching=config.prefix_caching,
        reload=ReloadCost(fixed_s=1e-4, page_s=geometry.page_bytes / bytes_per_s),
        prefix_page_s=geometry.page_tokens * token_s,
    )


def load_base(
    directory: Path, config: EngineConfig, *, name: str | None = None, progress: Progress | None = None
) -> LoadedBase:
    """Load a base from a Hugging Face directory. Raises BaseRefused or ConfigError."""
    model, checkpoint = open_checkpoint(directory)
    tokenizer = Tokenizer.load(directory)
    dtype = getattr(torch, model.dtype if config.dtype == "auto" else config.dtype)
    device = resolve_device(config)
    config = config.resolved(on_gpu=device.type == "cuda")
    torch.set_num_threads(config.threads)
    geometry = _plan_pool(config, model, dtype, device)
    max_len = _resolve_max_len(config, model, geometry)
    scheduler = _scheduler_config(config, geometry, max_len, on_gpu=device.type == "cuda")
    group = model.num_heads // model.num_kv_heads
    choice = choose_ops(device, dtype, config.threads, model.head_dim, group, model.extras)
    options = LoadOptions(device, scheduler.max_step_tokens, max_len, dtype)
    decoder = load_decoder(model, checkpoint, choice.ops, options, progress)
    return LoadedBase(
        description=describe_base(name or directory.resolve().name, model, checkpoint),
        config=config,
        decoder=decoder,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        geometry=geometry,
        scheduler_config=scheduler,
        kernels=choice.ops.name,
        note=choice.note,
    )
