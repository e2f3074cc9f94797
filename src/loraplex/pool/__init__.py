"""One page budget for KV and adapters: leases, residency, eviction, and where an adapter lies in its pages."""

from loraplex.pool.geometry import KvShape, PoolGeometry, plan_geometry
from loraplex.pool.layout import AdapterLayout, Chunk, Piece, SiteRank, plan_layout
from loraplex.pool.pool import Lease, PagePool
from loraplex.pool.residency import Acquired, AdapterResidency

__all__ = [
    "Acquired",
    "AdapterLayout",
    "AdapterResidency",
    "Chunk",
    "KvShape",
    "Lease",
    "PagePool",
    "Piece",
    "PoolGeometry",
    "SiteRank",
    "plan_geometry",
    "plan_layout",
]
