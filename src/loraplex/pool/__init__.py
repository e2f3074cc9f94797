"""One page budget for KV, adapters and cached prefixes: leases, residency, eviction, an adapter's layout."""

from loraplex.pool.adapter_state import AdapterState
from loraplex.pool.geometry import KvShape, PoolGeometry, plan_geometry
from loraplex.pool.idle import IdlePages
from loraplex.pool.layout import AdapterLayout, Chunk, Piece, SiteRank, plan_layout
from loraplex.pool.pool import Lease, PagePool
from loraplex.pool.prefix_cache import CacheSpace, PrefixCache, PrefixNode
from loraplex.pool.residency import Acquired, AdapterResidency, EvictionReason, Placement, ReloadCost

__all__ = [
    "Acquired",
    "AdapterLayout",
    "AdapterResidency",
    "AdapterState",
    "CacheSpace",
    "Chunk",
    "EvictionReason",
    "IdlePages",
    "KvShape",
    "Lease",
    "PagePool",
    "Piece",
    "Placement",
    "PoolGeometry",
    "PrefixCache",
    "PrefixNode",
    "ReloadCost",
    "SiteRank",
    "plan_geometry",
    "plan_layout",
]
