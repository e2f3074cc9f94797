// LoRA over segments and rank chunks that lie anywhere in the page pool.
#include "common.h"

extern "C" {

// Rows of one adapter are contiguous. Segment i holds rows [seg_start[i], seg_start[i + 1]) and uses table row
// seg_slot[i]; -1 is no adapter. Chunks of (slot, site) are chunk_start[slot][site] .. chunk_start[slot][site + 1].
// A chunk has rank rows of A [rank][d_in] at chunk_a and of B transposed [rank][d_out] at chunk_b, both in the pool.
struct LoraTables {
  const bf16* pool;
  const int32_t* seg_start;
  const int32_t* seg_slot;
  i64 num_segments;
  const int32_t* chunk_start;  // [slots][num_sites + 1]
  i64 num_sites;
  const i64* chunk_a;  // element offsets into pool
  const i64* chunk_b;
  const int32_t* chunk_rank;
  const float* scale;  // [slots][num_sites]
};

struct LoraSites {  // the sites of one fused linear: they share x, each has its own columns of y
  i64 count, d_in;
  const int32_t* site;
  const int32_t* d_out;
  const int32_t* out_offset;
};

}  // extern "C"

namespace {

struct ShrinkItem {
  i64 row0, row1, a, v;
  int rank, ldv;
};
struct ExpandItem {
  i64 row0, row1, v;
  int ldv, slot, local, col0, col1;
};

// v[i][c] = sum over k of x[i][k] a[c][k], R rows by C ranks in registers.
template <int R, int C>
inline void shrink_tile(const bf16* x, i64 ldx, const bf16* a, i64 k, float* v, i64 ldv) {
  __m512 acc[R][C];
  for (int i = 0; i < R; i++)
    for (int c = 0; c < C; c++) acc[i][c] = _mm512_setzero_ps();
  for (i64 kk = 0; kk < k; kk += 32) {
    const __mmask32 mask = k - kk >= 32 ? 0xffffffffu : (1u << (k - kk)) - 1;
    __m512i xs[R];
    for (int i = 0; i < R; i++) xs[i] = _mm512_maskz_loadu_epi16(mask, x + i * ldx + kk);
    for (int c = 0; c < C; c++) {
      const __m512i as = _mm512_maskz_loadu_epi16(mask, a + c * k + kk);
      for (int i = 0; i < R; i++) acc[i][c] = dot_bf16(acc[i][c], xs[i], as);
    }
  }
  for (int i = 0; i < R; i++)
    for (int c = 0; c < C; c++) v[i * ldv + c] = _mm512_reduce_add_ps(acc[i][c]);
}

template <int R>
inline void shrink_rows(const bf16* x, i64 ldx, const bf16* a, i64 k, int rank, float* v, i64 ldv) {
  int c = 0;
  for (; c + 4 <= rank; c += 4) shrink_tile<R, 4>(x, ldx, a + c * k, k, v + c, ldv);
  for (; c < rank; c++) shrink_tile<R, 1>(x, ldx, a + c * k, k, v + c, ldv);
}

inline void shrink_item(const ShrinkItem& it, const bf16* x, i64 ldx, const bf16* pool, i64 k, float* scratch) {
  i64 r = it.row0;
  float* v = scratch + it.v;
  for (; r + 4 <= it.row1; r += 4, v += 4 * it.ldv) shrink_rows<4>(x + r * ldx, ldx, pool + it.a, k, it.rank, v, it.ldv);
  for (; r < it.row1; r++, v += it.ldv) shrink_rows<1>(x + r * ldx, ldx, pool + it.a, k, it.rank, v, it.ldv);
}

// y[i][0..16 C) += scale * sum over the chunks and ranks of v[i][r] b[r][0..16 C), R rows by C vectors in registers.
template <int R, int C>
inline void expand_tile(bf16* y, i64 ldy, const LoraTables& t, int chunk0, int chunk1, i64 d_out, i64 col, i64 width,
                        const float* v, i64 ldv, float scale) {
  __m512 acc[R][C];
  __mmask16 mask[C];
  for (int c = 0; c < C; c++) {
    mask[c] = width - c * 16 > 0 ? tail_mask(width - c * 16) : (__mmask16)0;
    for (int i = 0; i < R; i++) acc[i][c] = _mm512_setzero_ps();
  }
  int r0 = 0;
  for (int ch = chunk0; ch < chunk1; ch++) {
    const bf16* b = t.pool + t.chunk_b[ch] + col;
    const int rank = t.chunk_rank[ch];
    for (int r = 0; r < rank; r++, b += d_out)
      for (int c = 0; c < C; c++) {
        const __m512 bs = load_bf16_masked(b + c * 16, mask[c]);
        for (int i = 0; i < R; i++) acc[i][c] = _mm512_fmadd_ps(_mm512_set1_ps(v[i * ldv + r0 + r]), bs, acc[i][c]);
      }
    r0 += rank;
  }
  const __m512 s = _mm512_set1_ps(scale);
  for (int i = 0; i < R; i++)
    for (int c = 0; c < C; c++) {
      bf16* out = y + i * ldy + c * 16;
      store_bf16_masked(out, _mm512_fmadd_ps(s, acc[i][c], load_bf16_masked(out, mask[c])), mask[c]);
    }
}

// The same for one row, streaming whole rows of B: the case of decoding, bound by memory.
inline void expand_row(bf16* y, const LoraTables& t, int chunk0, int chunk1, i64 d_out, i64 col0, i64 col1,
                       const float* v, float scale) {
  alignas(64) float acc[512];
  const i64 width = col1 - col0;
  for (i64 c = 0; c < width; c += 16) _mm512_store_ps(acc + c, _mm512_setzero_ps());
  for (int ch = chunk0; ch < chunk1; ch++) {
    const bf16* b = t.pool + t.chunk_b[ch] + col0;
    const int rank = t.chunk_rank[ch];
    for (int r = 0; r < rank; r += 4) {
      const int n = rank - r < 4 ? rank - r : 4;
      for (i64 c = 0; c < width; c += 16) {
        const __mmask16 mask = tail_mask(width - c);
        __m512 sum = _mm512_load_ps(acc + c);
        for (int j = 0; j < n; j++)
          sum = _mm512_fmadd_ps(_mm512_set1_ps(v[r + j]), load_bf16_masked(b + (r + j) * d_out + c, mask), sum);
        _mm512_store_ps(acc + c, sum);
      }
    }
    v += rank;
  }
  const __m512 s = _mm512_set1_ps(scale);
  for (i64 c = 0; c < width; c += 16) {
    const __mmask16 mask = tail_mask(width - c);
    store_bf16_masked(y + col0 + c, _mm512_fmadd_ps(s, _mm512_load_ps(acc + c), load_bf16_masked(y + col0 + c, mask)), mask);
  }
}

inline void expand_item(const ExpandItem& it, bf16* y, i64 ldy, const LoraTables& t, const LoraSites& sites,
                        const float* scratch) {
  const int site = sites.site[it.local];
  const int32_t* chunks = t.chunk_start + it.slot * (t.num_sites + 1) + site;
  const float scale = t.scale[it.slot * t.num_sites + site];
  const i64 d_out = sites.d_out[it.local];
  bf16* out = y + sites.out_offset[it.local];
  const float* v = scratch + it.v;
  i64 r = it.row0;
  for (; r + 4 <= it.row1; r += 4, v += 4 * it.ldv)
    for (i64 c = it.col0; c < it.col1; c += 64)
      expand_tile<4, 4>(out + r * ldy + c, ldy, t, chunks[0], chunks[1], d_out, c, it.col1 - c, v, it.ldv, scale);
  for (; r < it.row1; r++, v += it.ldv)
    expand_row(out + r * ldy, t, chunks[0], chunks[1], d_out, it.col0, it.col1, v, scale);
}

const i64 kRowBlock = 32, kColumnBlock = 384;

// Cut the work of one fused linear into items of similar size. Returns the floats of scratch that v needs.
i64 plan_lora(const LoraTables& t, const LoraSites& sites, std::vector<ShrinkItem>& shrinks,
              std::vector<ExpandItem>& expands) {
  i64 used = 0;
  for (i64 s = 0; s < t.num_segments; s++) {
    const int slot = t.seg_slot[s];
    if (slot < 0) continue;
    for (i64 j = 0; j < sites.count; j++) {
      const int32_t* chunks = t.chunk_start + slot * (t.num_sites + 1) + sites.site[j];
      int rank = 0;
      for (int ch = chunks[0]; ch < chunks[1]; ch++) rank += t.chunk_rank[ch];
      if (!rank) continue;
      const int d_out = sites.d_out[j];
      const int column_blocks = (int)((d_out + kColumnBlock - 1) / kColumnBlock);
      const int width = ((d_out + column_blocks - 1) / column_blocks + 31) / 32 * 32;
      for (i64 r = t.seg_start[s]; r < t.seg_start[s + 1]; r += kRowBlock) {
        const i64 end = r + kRowBlock < t.seg_start[s + 1] ? r + kRowBlock : t.seg_start[s + 1];
        int r0 = 0;
        for (int ch = chunks[0]; ch < chunks[1]; r0 += t.chunk_rank[ch], ch++)
          shrinks.push_back({r, end, t.chunk_a[ch], used + r0, t.chunk_rank[ch], rank});
        for (int c = 0; c < d_out; c += width)
          expands.push_back({r, end, used, rank, slot, (int)j, c, c + width < d_out ? c + width : d_out});
        used += (end - r) * rank;
      }
    }
  }
  return used;
}

}  // namespace

extern "C" {

// y += scale * (x A^T) B for every segment and site that has chunks; everything else is left as it is.
void lp_add_lora(bf16* y, i64 ldy, const bf16* x, i64 ldx, const LoraTables* tables, const LoraSites* sites, int threads) {
  static thread_local std::vector<ShrinkItem> shrinks;
  static thread_local std::vector<ExpandItem> expands;
  static thread_local std::vector<float> scratch;
  shrinks.clear();
  expands.clear();
  const i64 floats = plan_lora(*tables, *sites, shrinks, expands);
  if (!floats) return;
  if ((i64)scratch.size() < floats) scratch.resize(floats);
  const ShrinkItem* shrink = shrinks.data();
  const ExpandItem* expand = expands.data();
  const i64 num_shrinks = (i64)shrinks.size(), num_expands = (i64)expands.size();
  float* v = scratch.data();
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic, 1)
    for (i64 i = 0; i < num_shrinks; i++) shrink_item(shrink[i], x, ldx, tables->pool, sites->d_in, v);
#pragma omp for schedule(dynamic, 1)
    for (i64 i = 0; i < num_expands; i++) expand_item(expand[i], y, ldy, *tables, *sites, v);
  }
}

}  // extern "C"
