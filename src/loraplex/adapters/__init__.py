"""Adapter artifacts: read them, check them against a base, give them an identity and a name. Torch is never imported.

`load_adapter` is the one way in: what it returns is exact weights for named layers, what it cannot serve exactly it
refuses with a stable reason. `AdapterCatalog` holds the names of one server.
"""

from loraplex.adapters.artifact import Artifact, read_artifact
from loraplex.adapters.catalog import AdapterCatalog, CatalogEntry
from loraplex.adapters.digest import digest_modules
from loraplex.adapters.limits import AdapterLimits
from loraplex.adapters.safetensors_file import read_metadata
from loraplex.adapters.types import Adapter, AdapterModule, TensorView
from loraplex.adapters.validate import check_artifact, load_adapter

__all__ = [
    "Adapter",
    "AdapterCatalog",
    "AdapterLimits",
    "AdapterModule",
    "Artifact",
    "CatalogEntry",
    "TensorView",
    "check_artifact",
    "digest_modules",
    "load_adapter",
    "read_artifact",
    "read_metadata",
]
