"""Adapter shapes of known models, for the tests of the pool."""

from dataclasses import dataclass

from loraplex.pool import KvShape, SiteRank


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the pool needs to know of a decoder."""

    kv: KvShape
    hidden: int
    intermediate: int
    num_heads: int

    @property
    def max_site_dim(self) -> int:
        return max(self.hidden, self.intermediate, self.num_heads * self.kv.head_dim)

    def sites(self, rank: int) -> list[SiteRank]:
        """All seven projections of every layer, with one rank."""
        q_dim = self.num_heads * self.kv.head_dim
        kv_dim = self.kv.num_kv_heads * self.kv.head_dim
        layer = (
            (self.hidden, q_dim),
            (self.hidden, kv_dim),
            (self.hidden, kv_dim),
            (q_dim, self.hidden),
            (self.hidden, self.intermediate),
            (self.hidden, self.intermediate),
            (self.intermediate, self.hidden),
        )
        dims = layer * self.kv.num_layers
        return [SiteRank(idx, d_in, d_out, rank) for idx, (d_in, d_out) in enumerate(dims)]


LLAMA_3_8B = ModelShape(KvShape(32, 8, 128), hidden=4096, intermediate=14336, num_heads=32)
SMOLLM2_135M = ModelShape(KvShape(30, 3, 64), hidden=576, intermediate=1536, num_heads=9)
SMOLLM2_1_7B = ModelShape(KvShape(24, 32, 64), hidden=2048, intermediate=8192, num_heads=32)
