"""Page images hold exactly the adapter's values, and nothing else."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.adapters import Adapter, AdapterLimits, load_adapter
from loraplex.core import AdapterRefused, PageId, RefusalReason
from loraplex.engine import EngineConfig, LoadedBase, load_base
from loraplex.engine.host_arena import HostArena
from loraplex.engine.packing import PackedAdapter, pack_adapter

from ..conftest import MakeAdapter, MakeBase
from ..oracle import Harness


@pytest.fixture(scope="module")
def loaded(tiny_base: MakeBase) -> LoadedBase:
    return load_base(tiny_base("llama"), EngineConfig(dtype="float32", memory_bytes=2**23, num_threads=1))


def read(path: Path, loaded: LoadedBase) -> Adapter:
    return load_adapter(path, loaded.description, AdapterLimits())


def pack(adapter: Adapter, loaded: LoadedBase, dtype: torch.dtype = torch.float32) -> PackedAdapter:
    arena = HostArena(loaded.geometry.page_elems, dtype, block_bytes=2**16)
    return pack_adapter(adapter, loaded.description.sites, loaded.geometry, arena.allocate)


def unpack(packed: PackedAdapter, site: int, d_in: int, d_out: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A [rank, d_in] and B [d_out, rank] of a site, read from the pages the way a kernel reads them."""
    pages = [PageId(7 * i + 3) for i in range(packed.num_pages)]  # scattered
    page_elems = packed.image.page_elems
    pool = torch.full(((max(pages) + 1) * page_elems,), float("nan"))
    for page, image in zip(pages, packed.image, strict=True):
        pool[page * page_elems : (page + 1) * page_elems] = image.float()
    offsets = packed.chunk_offsets(pages, page_elems)
    a_parts, b_parts = [], []
    for chunk in range(packed.chunk_start[site], packed.chunk_start[site + 1]):
        rank, (a, b) = int(packed.chunk_rank[chunk]), offsets[:, chunk]
        a_parts.append(pool[a : a + rank * d_in].view(rank, d_in))
        b_parts.append(pool[b : b + rank * d_out].view(rank, d_out))
    return torch.cat(a_parts), torch.cat(b_parts).T


@pytest.mark.parametrize("options", [{"rank": 1}, {"rank": 16}, {"rank": 33, "targets": ("v_proj", "down_proj")}])
def test_images_hold_every_value_at_its_place(
    options: dict[str, object], loaded: LoadedBase, tiny_base: MakeBase, tiny_adapter: MakeAdapter
) -> None:
    path = tiny_adapter(tiny_base("llama"), **options)
    adapter, stored = read(path, loaded), load_file(path / "adapter_model.safetensors")
    packed = pack(adapter, loaded)
    adapted = {module.site.name: module for module in adapter.modules}
    for index, site in enumerate(loaded.description.sites):
        if site.name not in adapted:
            assert packed.chunk_start[index] == packed.chunk_start[index + 1]
            assert packed.scale[index] == 0
            continue
        a, b = unpack(packed, index, site.d_in, site.d_out)
        assert torch.equal(a, stored[f"base_model.model.{site.name}.lora_A.weight"])
        assert torch.equal(b, stored[f"base_model.model.{site.name}.lora_B.weight"])
        assert packed.scale[index] == np.float32(adapted[site.name].scale)


def test_cost_follows_the_true_rank(loaded: LoadedBase, tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> None:
    """No padding to a maximum: elements used are r (d_in + d_out) summed, and pages hardly more."""
    for rank in (1, 5, 64):
        packed = pack(read(tiny_adapter(tiny_base("llama"), rank=rank), loaded), loaded)
        used = rank * sum(site.d_in + site.d_out for site in loaded.description.sites)
        assert int((packed.image.stacked() != 0).sum()) == used
        assert packed.num_pages <= -(-used // packed.image.page_elems) * 1.25 + 1


def test_pieces_do_not_overlap_or_cross_pages(
    loaded: LoadedBase, tiny_base: MakeBase, tiny_adapter: MakeAdapter
) -> None:
    packed = pack(read(tiny_adapter(tiny_base("llama"), rank=33), loaded), loaded)
    page_elems = packed.image.page_elems
    taken = np.zeros(packed.num_pages * page_elems, dtype=int)
    for site_index, site in enumerate(loaded.description.sites):
        for chunk in range(packed.chunk_start[site_index], packed.chunk_start[site_index + 1]):
            for side, width in ((0, site.d_in), (1, site.d_out)):
                size = int(packed.chunk_rank[chunk]) * width
                offset, page = packed.piece_offset[side, chunk], packed.piece_page[side, chunk]
                assert offset + size <= page_elems
                taken[page * page_elems + offset : page * page_elems + offset + size] += 1
    assert taken.max() == 1


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("served", [torch.float16, torch.bfloat16, torch.float32])
def test_values_are_cast_once(
    stored: torch.dtype,
    served: torch.dtype,
    loaded: LoadedBase,
    tiny_base: MakeBase,
    tiny_adapter: MakeAdapter,
    tmp_path: Path,
) -> None:
    source = tiny_adapter(tiny_base("llama"), rank=3)
    tensors = {k: v.to(stored) for k, v in load_file(source / "adapter_model.safetensors").items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    packed = pack(read(tmp_path, loaded), loaded, served)
    assert packed.image.dtype is served
    site = loaded.description.sites[6]
    a, b = unpack(packed, 6, site.d_in, site.d_out)
    assert torch.equal(a, tensors[f"base_model.model.{site.name}.lora_A.weight"].to(served).float())
    assert torch.equal(b, tensors[f"base_model.model.{site.name}.lora_B.weight"].to(served).float())


def test_value_beyond_the_served_dtype_is_refused_by_name(
    loaded: LoadedBase, tiny_base: MakeBase, tiny_adapter: MakeAdapter, tmp_path: Path
) -> None:
    source = tiny_adapter(tiny_base("llama"), rank=3)
    tensors = load_file(source / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    tensors[name][0, 0] = 1e5  # float16 ends at 65504
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    adapter = read(tmp_path, loaded)
    with pytest.raises(AdapterRefused) as caught:
        pack(adapter, loaded, torch.float16)
    assert (caught.value.reason, caught.value.subject) == (RefusalReason.NONFINITE, name)
    pack(adapter, loaded, torch.bfloat16)


def test_same_adapter_packs_to_the_same_image(
    loaded: LoadedBase, tiny_base: MakeBase, tiny_adapter: MakeAdapter
) -> None:
    adapter = read(tiny_adapter(tiny_base("llama"), rank=5), loaded)
    assert torch.equal(pack(adapter, loaded).image.stacked(), pack(adapter, loaded).image.stacked())


def test_adapter_must_leave_room_for_a_request(tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> None:
    base = tiny_base("llama")
    path = tiny_adapter(base, rank=16)
    pages = pack(read(path, load_base(base, EngineConfig(num_threads=1))), load_base(base, EngineConfig())).num_pages
    with pytest.raises(AdapterRefused) as caught:
        Harness(base, kv_pages=pages).load("a", path)
    assert caught.value.reason is RefusalReason.TOO_LARGE
    assert str(pages) in caught.value.message
    harness = Harness(base, kv_pages=pages + 1)
    harness.answer((1, 2), adapter=harness.load("a", path))
