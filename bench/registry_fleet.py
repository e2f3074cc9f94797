"""A registry of many small adapters in a data directory, made once and kept: random weights on the demo base."""

import json
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from loraplex.adapters import AdapterLimits, Artifact, check_artifact
from loraplex.core import BaseDescription
from loraplex.model import describe_base, open_checkpoint
from loraplex.registry import AdapterFacts, Registry, RegistryConfig, Role
from loraplex.registry.blobs import StagedBlob

MARKER = "bench_fleet.json"
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """What is registered: adapters spread over tenants, ranks in turn, on the attention's four projections."""

    num_adapters: int
    num_tenants: int
    ranks: tuple[int, ...]

    def tenant(self, place: int) -> str:
        return f"tenant-{place % self.num_tenants}"

    def name(self, place: int) -> str:
        return f"adapter-{place}"

    def rank(self, place: int) -> int:
        return self.ranks[place // self.num_tenants % len(self.ranks)]


def describe(base: Path, name: str) -> BaseDescription:
    model, checkpoint = open_checkpoint(base)
    return describe_base(name, model, checkpoint)


def make_registry(data_dir: Path, spec: FleetSpec, base: BaseDescription) -> bool:
    """Publish every adapter, with the comparison skipped, unless the directory has them; whether it did.

    Files are checked in this process rather than in a child of its own for each.
    """
    wanted = json.dumps(asdict(spec) | {"base": base.fingerprint})
    marker = data_dir / MARKER
    if marker.exists() and marker.read_text() == wanted:
        return False
    shutil.rmtree(data_dir, ignore_errors=True)
    operator = Registry.local_operator()
    with Registry(RegistryConfig(data_dir), validate=_check) as registry, tempfile.TemporaryDirectory() as folder:
        for number in range(spec.num_tenants):
            registry.tenants.create(operator, f"tenant-{number}")
        values = torch.randn(4_000_000, generator=torch.Generator().manual_seed(0)).bfloat16()
        for place in range(spec.num_adapters):
            tenant, name = spec.tenant(place), spec.name(place)
            _write_adapter(Path(folder), base, spec.rank(place), place, values)
            version = registry.publish(operator, tenant, name, Path(folder), base, base_fingerprint=base.fingerprint)
            registry.adapters.skip_verification(operator, tenant, name, version.number)
            registry.adapters.activate(operator, tenant, name, version.number, expected=None)
    marker.write_text(wanted)
    return True


def make_keys(data_dir: Path, spec: FleetSpec) -> dict[str, str]:
    """A new key for each tenant, for a day."""
    operator, expires = Registry.local_operator(), time.time() + 86_400
    with Registry(RegistryConfig(data_dir)) as registry:
        return {
            tenant: registry.keys.create(operator, tenant, Role.TENANT, expires_at=expires).key.reveal()
            for tenant in (f"tenant-{number}" for number in range(spec.num_tenants))
        }


def _check(config: StagedBlob, weights: StagedBlob, base: BaseDescription) -> AdapterFacts:
    artifact = Artifact(config.path.read_bytes(), memoryview(weights.path.read_bytes()))
    adapter = check_artifact(artifact, base, AdapterLimits())
    return AdapterFacts(adapter.digest, adapter.max_rank, adapter.num_bytes, adapter.targets, adapter.declared_base)


def _write_adapter(folder: Path, base: BaseDescription, rank: int, seed: int, values: torch.Tensor) -> None:
    """A PEFT directory; tensors are cut from `values` at places of their own."""
    tensors = {}
    for number, site in enumerate(site for site in base.sites if site.module in MODULES):
        for part, shape, std in (("A", (rank, site.d_in), site.d_in**-0.5), ("B", (site.d_out, rank), 0.02)):
            count = shape[0] * shape[1]
            start = (seed * 7919 + number * 104_729 + (part == "B") * 31) % (len(values) - count)
            tensors[f"base_model.model.{site.name}.lora_{part}.weight"] = (
                (values[start : start + count] * std).view(shape).contiguous()
            )
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
    config |= {"base_model_name_or_path": base.name, "target_modules": list(MODULES)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
