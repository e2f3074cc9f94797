"""Random weights in the shapes of Llama-3-8B: a base on disk, adapters in memory, and the bytes a step reads.

Speed and exactness can be measured on such weights, quality cannot. `python bench/llama8b.py DIRECTORY [--tiny]` writes
the base; the GPU benchmarks do so themselves.
"""

import argparse
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

from loraplex.adapters import Adapter, AdapterModule, TensorView
from loraplex.core import AdapterDigest, BaseSite
from loraplex.model import expected_tensors, list_sites
from loraplex.model.config import parse_config

READ_TB_S = 4.38  # read bandwidth of an H200, measured (DESIGN.md section 5)
WEIGHT_STD = 0.02
SCALE = 2.0  # of every adapter
DELTA_SHARE = 0.05  # size of what an adapter adds beside the base's output
MARKER = "bench_base.json"
NUM_SHARDS = 8
INIT = 3  # of the weights; a base written with another is written again


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama. Head size is hidden / heads."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    context: int

    def config(self) -> dict[str, Any]:
        """config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "torch_dtype": "bfloat16",
        }

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor."""
        return expected_tensors(parse_config(self.config()))

    @property
    def sites(self) -> tuple[BaseSite, ...]:
        """Every linear that an adapter may adapt."""
        return list_sites(parse_config(self.config()))


LLAMA8B = Shape("Llama-3-8B", 4096, 32, 32, 8, 14336, 128256, 8192)
TINY = Shape("tiny", 256, 4, 4, 2, 512, 512, 4096)


# ---------------------------------------------------------------------- bytes
@dataclass(frozen=True, slots=True)
class ByteModel:
    """Bytes that a decode step must read (BENCH.md 3.1), and the time that takes at `tb_s`."""

    weight_bytes: int  # of all linears and the head
    kv_token_bytes: int
    rank_unit_bytes: int  # of one rank of an adapter on all linears
    tb_s: float = READ_TB_S

    @classmethod
    def of(cls, shape: Shape, tb_s: float = READ_TB_S) -> "ByteModel":
        """The model of a shape with 2-byte weights, keys and values."""
        sites = shape.sites
        weights = sum(site.d_in * site.d_out for site in sites) + shape.vocab * shape.hidden
        kv_token = 2 * shape.layers * shape.kv_heads * (shape.hidden // shape.heads)
        return cls(2 * weights, 2 * kv_token, 2 * sum(site.d_in + site.d_out for site in sites), tb_s)

    def step_bytes(self, batch: int, mean_context: float, rank_units: int = 0) -> float:
        """With `rank_units` the sum of the ranks of the distinct adapters."""
        return self.weight_bytes + batch * mean_context * self.kv_token_bytes + rank_units * self.rank_unit_bytes

    def step_ms(self, batch: int, mean_context: float, rank_units: int = 0) -> float:
        return self.ms(self.step_bytes(batch, mean_context, rank_units))

    def ms(self, num_bytes: float) -> float:
        return num_bytes / (self.tb_s * 1e9)


# ---------------------------------------------------------------------- base
def _shards(shape: Shape, count: int) -> list[dict[str, tuple[int, ...]]]:
    """The tensors in `count` parts of about one size."""
    parts: list[dict[str, tuple[int, ...]]] = [{} for _ in range(count)]
    sizes = [0] * count
    for name, size in sorted(shape.tensors.items(), key=lambda item: -_numel(item[1])):
        smallest = sizes.index(min(sizes))
        parts[smallest][name] = size
        sizes[smallest] += _numel(size)
    return [part for part in parts if part]


def _numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _header(part: Mapping[str, tuple[int, ...]]) -> bytes:
    """The first bytes of a safetensors file of bfloat16 tensors."""
    entries, end = {}, 0
    for name, size in part.items():
        start, end = end, end + 2 * _numel(size)
        entries[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _std(name: str, layers: int) -> float:
    """Standard deviation of a weight. One layer adds some 5 % to the residual, as in trained models.

    Where each adds as much as the residual has, a random network multiplies what rounding does to it: 7 % at 32 layers,
    in torch's bfloat16 as well, and a comparison with float32 would show nothing else.
    """
    if "embed_tokens" in name:
        return 1.0
    is_added = "o_proj" in name or "down_proj" in name
    return WEIGHT_STD / (32 * layers) ** 0.5 if is_added else WEIGHT_STD


@torch.inference_mode()
def _write_shard(path: Path, part: Mapping[str, tuple[int, ...]], seed: int, layers: int, device: torch.device) -> int:
    """Fill the tensors on `device` and write them one after the other: file writes let other threads run."""
    generator = torch.Generator(device).manual_seed(seed)
    largest = max(map(_numel, part.values()))
    host = torch.empty(largest, dtype=torch.bfloat16, pin_memory=device.type == "cuda")
    values = torch.empty(largest, dtype=torch.bfloat16, device=device)
    with path.open("wb") as file:
        file.write(_header(part))
        for name, size in part.items():
            count = _numel(size)
            if "norm" in name:
                values[:count].fill_(1.0)
            else:
                values[:count].normal_(0.0, _std(name, layers), generator=generator)
            host[:count].copy_(values[:count])
            file.write(host[:count].view(torch.uint8).numpy().data)
    return path.stat().st_size


def _is_complete(directory: Path, shape: Shape) -> bool:
    try:
        marker = json.loads((directory / MARKER).read_text())
        sizes = {name: (directory / name).stat().st_size for name in marker["sizes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(marker["shape"] == asdict(shape) and sizes == marker["sizes"] and marker.get("init") == INIT)


def make_base(directory: Path, shape: Shape = LLAMA8B, *, seed: int = 0) -> float:
    """Write the base unless it is there; seconds it took. The same seed on the same device gives the same weights."""
    if _is_complete(directory, shape):
        return 0.0
    started = time.perf_counter()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MARKER).unlink(missing_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts = _shards(shape, NUM_SHARDS)
    names = [f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
    with ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1)) as pool:
        jobs = [
            pool.submit(_write_shard, directory / name, part, seed * len(parts) + i, shape.layers, device)
            for i, (name, part) in enumerate(zip(names, parts, strict=True))
        ]
        sizes = {name: job.result() for name, job in zip(names, jobs, strict=True)}
    weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(shape.config(), indent=1))
    words = {f"t{i}": i for i in range(shape.vocab)}
    tokens = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    tokens.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokens.save(str(directory / "tokenizer.json"), pretty=False)
    (directory / MARKER).write_text(json.dumps({"shape": asdict(shape), "sizes": sizes, "init": INIT}))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return time.perf_counter() - started


# ---------------------------------------------------------------------- adapters
class RandomBuffers:
    """Normal bfloat16 numbers by standard deviation. Tensors cut from them at many offsets share their memory."""

    def __init__(self, largest: int) -> None:
        self.size = largest + 4096
        self._buffers: dict[float, memoryview] = {}

    def take(self, name: str, shape: tuple[int, int], std: float, offset: int) -> TensorView:
        """A tensor that begins `offset` (cut to what there is room for) elements into its buffer."""
        if std not in self._buffers:
            generator = torch.Generator().manual_seed(round(std * 1e9))
            values = torch.empty(self.size, dtype=torch.bfloat16).normal_(0.0, std, generator=generator)
            self._buffers[std] = values.view(torch.uint8).numpy().data
        count = shape[0] * shape[1]
        start = 2 * (offset % (self.size - count))
        return TensorView(name, "BF16", shape, self._buffers[std][start : start + 2 * count])


def make_buffers(sites: Sequence[BaseSite], max_rank: int = 128) -> RandomBuffers:
    """Buffers for adapters of `sites`."""
    return RandomBuffers(max_rank * max(max(site.d_in, site.d_out) for site in sites))


def make_adapter(
    sites: Sequence[BaseSite], rank: int | Mapping[str, int], seed: int, buffers: RandomBuffers | None = None
) -> Adapter:
    """An adapter with random A and B, in memory; what it adds has about DELTA_SHARE of the size of the base's output.

    `rank` may differ by module name; modules not named have none. Tensors of one adapter, and of adapters made with the
    same buffers, share host memory: copied to pages, each has its own. The same arguments give the same adapter: the
    digest is of them, as hashing the data would take longer than the measurements.
    """
    buffers = buffers or make_buffers(sites)
    ranks = rank if isinstance(rank, Mapping) else dict.fromkeys([site.module for site in sites], rank)
    modules, num_bytes = [], 0
    take = partial(_offset, seed)
    for index, site in enumerate(sites):
        r = ranks.get(site.module, 0)
        if not r:
            continue
        base_std = _std(site.name, sites[-1].layer + 1) * site.d_in**0.5  # of the base's output for an input of size 1
        b_std = DELTA_SHARE * base_std / (SCALE * r**0.5)  # x A has size 1
        a = buffers.take(f"{site.name}.lora_A.weight", (r, site.d_in), site.d_in**-0.5, take(2 * index))
        b = buffers.take(f"{site.name}.lora_B.weight", (site.d_out, r), b_std, take(2 * index + 1))
        modules.append(AdapterModule(site, r, SCALE, a, b))
        num_bytes += a.data.nbytes + b.data.nbytes
    label = json.dumps(["bench", seed, sorted(ranks.items()), len(sites), buffers.size])
    return Adapter(
        digest=AdapterDigest(hashlib.sha256(label.encode()).hexdigest()),
        modules=tuple(modules),
        max_rank=max(module.rank for module in modules),
        num_bytes=num_bytes,
        targets=tuple(sorted({module.site.module for module in modules})),
        declared_base=None,
    )


def _offset(seed: int, number: int) -> int:
    """Where in its buffer a tensor begins: scattered, in steps of 8 elements."""
    return 8 * ((seed * 7919 + number * 104729) % 1_000_003)


def as_tensor(view: TensorView, device: torch.device | str = "cpu") -> Tensor:
    """A view's values, on a device."""
    return torch.frombuffer(bytearray(view.data), dtype=torch.bfloat16).reshape(view.shape).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes")
    args = parser.parse_args()
    shape = TINY if args.tiny else LLAMA8B
    seconds = make_base(args.directory, shape)
    print(f"{shape.name}, {ByteModel.of(shape).weight_bytes / 1e9:.2f} GB read a step, written in {seconds:.1f} s")


if __name__ == "__main__":
    main()
