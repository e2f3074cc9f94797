// LoRA over segments and rank chunks that lie anywhere in the page pool.
#include <algorithm>

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

// Rows of one item; columns of one: as many as an item's accumulators hold, fewer where few segments share the threads.
const i64 kRowBlock = 32, kWideBlock = 2048, kNarrowBlock = 384;

// v[i][c] = sum over k of x[i][k] a[c][k], R rows by C ranks in registers.
template <int R, int C>
inline void shrink_tile(const bf16* x, i64 ldx, const bf16* a, i64 k, float* v, i64 ldv) {
  __m512 acc[R][C];
  for (int i = 0; i < R; i++)
    for (int c = 0; c < C; c++) acc[i][c] = _mm512_setzero_ps();
  const auto step = [&](i64 kk, auto load) {
    __m512i xs[R];
    for (int i = 0; i < R; i++) xs[i] = load(x + i * ldx + kk);
    for (int c = 0; c < C; c++) {
      const __m512i as = load(a + c * k + kk);
      if (R == 1) _mm_prefetch((const char*)(a + (c + C) * k + kk), _MM_HINT_T0);  // the next C ranks
      for (int i = 0; i < R; i++) acc[i][c] = dot_bf16(acc[i][c], xs[i], as);
    }
  };
  i64 kk = 0;
  for (; kk + 32 <= k; kk += 32) step(kk, [](const bf16* p) { return _mm512_loadu_si512(p); });
  if (kk < k) {
    const __mmask32 mask = (1u << (k - kk)) - 1;
    step(kk, [mask](const bf16* p) { return _mm512_maskz_loadu_epi16(mask, p); });
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
// `load` and `store` take a pointer and a vector's number; they are masked where the columns end.
template <int R, int C, class Load, class Store>
inline void expand_tile(bf16* y, i64 ldy, const LoraTables& t, int chunk0, int chunk1, i64 d_out, i64 col, const float* v,
                        i64 ldv, float scale, const Load& load, const Store& store) {
  __m512 acc[R][C];
  for (int i = 0; i < R; i++)
    for (int c = 0; c < C; c++) acc[i][c] = _mm512_setzero_ps();
  for (int ch = chunk0; ch < chunk1; ch++) {
    const bf16* b = t.pool + t.chunk_b[ch] + col;
    const int rank = t.chunk_rank[ch];
    for (int r = 0; r < rank; r++, b += d_out) {
      __m512 bs[C];
      for (int c = 0; c < C; c++) bs[c] = load(b + c * 16, c);
      for (int i = 0; i < R; i++) {
        const __m512 vs = _mm512_set1_ps(v[i * ldv + r]);
        for (int c = 0; c < C; c++) acc[i][c] = _mm512_fmadd_ps(vs, bs[c], acc[i][c]);
      }
    }
    v += rank;
  }
  const __m512 s = _mm512_set1_ps(scale);
  for (int i = 0; i < R; i++)
    for (int c = 0; c < C; c++) {
      bf16* out = y + i * ldy + c * 16;
      store(out, _mm512_fmadd_ps(s, acc[i][c], load(out, c)), c);
    }
}

// Rows of an item four at a time. Columns are the outer loop: a block of B then stays in the nearest cache.
template <class Tile>
inline void for_row_quads(i64 rows, const Tile& tile) {
  for (i64 r = 0; r + 4 <= rows; r += 4) tile(r);
}

inline void expand_row_quads(bf16* y, i64 ldy, i64 rows, const LoraTables& t, const int32_t* chunks, i64 d_out, i64 col0,
                             i64 col1, const float* v, i64 ldv, float scale) {
  i64 c = col0;
  for (; c + 64 <= col1; c += 64)
    for_row_quads(rows, [&](i64 r) {
      expand_tile<4, 4>(y + r * ldy + c, ldy, t, chunks[0], chunks[1], d_out, c, v + r * ldv, ldv, scale,
                        [](const bf16* p, int) { return load_bf16(p); }, [](bf16* p, __m512 x, int) { store_bf16(p, x); });
    });
  if (c == col1) return;
  __mmask16 mask[4];
  for (int i = 0; i < 4; i++) mask[i] = col1 - c - i * 16 > 0 ? tail_mask(col1 - c - i * 16) : (__mmask16)0;
  for_row_quads(rows, [&](i64 r) {
    expand_tile<4, 4>(y + r * ldy + c, ldy, t, chunks[0], chunks[1], d_out, c, v + r * ldv, ldv, scale,
                      [&](const bf16* p, int i) { return load_bf16_masked(p, mask[i]); },
                      [&](bf16* p, __m512 x, int i) { store_bf16_masked(p, x, mask[i]); });
  });
}

// acc[c] += sum over N ranks of v[r] b[r][c]; asks for the ranks after them.
template <int N>
inline void stream_ranks(float* acc, const bf16* b, i64 d_out, i64 width, const float* v) {
  __m512 vs[N];
  for (int j = 0; j < N; j++) vs[j] = _mm512_set1_ps(v[j]);
  const auto step = [&](i64 c, auto load) {
    __m512 sum = _mm512_load_ps(acc + c);
    for (int j = 0; j < N; j++) sum = _mm512_fmadd_ps(vs[j], load(b + j * d_out + c), sum);
    _mm512_store_ps(acc + c, sum);
  };
  i64 c = 0;
  for (; c + 32 <= width; c += 32) {
    for (int j = 0; j < N; j++) _mm_prefetch((const char*)(b + (N + j) * d_out + c), _MM_HINT_T0);
    step(c, [](const bf16* p) { return load_bf16(p); });
    step(c + 16, [](const bf16* p) { return load_bf16(p); });
  }
  for (; c < width; c += 16) {
    const __mmask16 mask = tail_mask(width - c);
    step(c, [mask](const bf16* p) { return load_bf16_masked(p, mask); });
  }
}

// The same for one row, streaming whole rows of B: the case of decoding, bound by memory.
inline void expand_row(bf16* y, const LoraTables& t, int chunk0, int chunk1, i64 d_out, i64 col0, i64 col1,
                       const float* v, float scale) {
  alignas(64) float acc[kWideBlock];
  const i64 width = col1 - col0;
  for (i64 c = 0; c < width; c += 16) _mm512_store_ps(acc + c, _mm512_setzero_ps());
  for (int ch = chunk0; ch < chunk1; ch++) {
    const bf16* b = t.pool + t.chunk_b[ch] + col0;
    const int rank = t.chunk_rank[ch];
    int r = 0;
    for (; r + 4 <= rank; r += 4) stream_ranks<4>(acc, b + r * d_out, d_out, width, v + r);
    for (; r < rank; r++) stream_ranks<1>(acc, b + r * d_out, d_out, width, v + r);
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
  const i64 rows = it.row1 - it.row0;
  out += it.row0 * ldy;
  expand_row_quads(out, ldy, rows, t, chunks, d_out, it.col0, it.col1, v, it.ldv, scale);
  for (i64 r = rows / 4 * 4; r < rows; r++)
    expand_row(out + r * ldy, t, chunks[0], chunks[1], d_out, it.col0, it.col1, v + r * it.ldv, scale);
}

// Cut the work of one fused linear into items of similar size. Returns the floats of scratch that v needs.
i64 plan_lora(const LoraTables& t, const LoraSites& sites, std::vector<ShrinkItem>& shrinks,
              std::vector<ExpandItem>& expands) {
  i64 used = 0;
  const bool many = t.num_segments >= 8;
  const i64 column_block = many ? kWideBlock : kNarrowBlock;
  for (i64 s = 0; s < t.num_segments; s++) {
    const int slot = t.seg_slot[s];
    if (slot < 0) continue;
    for (i64 j = 0; j < sites.count; j++) {
      const int32_t* chunks = t.chunk_start + slot * (t.num_sites + 1) + sites.site[j];
      int rank = 0;
      for (int ch = chunks[0]; ch < chunks[1]; ch++) rank += t.chunk_rank[ch];
      if (!rank) continue;
      const int d_out = sites.d_out[j];
      const int column_blocks = (int)((d_out + column_block - 1) / column_block);
      const int width = ((d_out + column_blocks - 1) / column_blocks + 31) / 32 * 32;
      const i64 row_block = many || t.seg_start[s + 1] - t.seg_start[s] > 4 * kRowBlock ? kRowBlock : kRowBlock / 4;
      for (i64 r = t.seg_start[s]; r < t.seg_start[s + 1]; r += row_block) {
        const i64 end = r + row_block < t.seg_start[s + 1] ? r + row_block : t.seg_start[s + 1];
        int r0 = 0;
        for (int ch = chunks[0]; ch < chunks[1]; r0 += t.chunk_rank[ch], ch++)
          shrinks.push_back({r, end, t.chunk_a[ch], used + r0, t.chunk_rank[ch], rank});
        for (int c = 0; c < d_out; c += width)
          expands.push_back({r, end, used, rank, slot, (int)j, c, c + width < d_out ? c + width : d_out});
        used += (end - r) * rank;
      }
    }
  }
  // Largest first, so that no thread is left with a large one at the end.
  std::stable_sort(shrinks.begin(), shrinks.end(), [](const ShrinkItem& a, const ShrinkItem& b) { return a.rank > b.rank; });
  std::stable_sort(expands.begin(), expands.end(), [](const ExpandItem& a, const ExpandItem& b) {
    return a.ldv * (a.col1 - a.col0) > b.ldv * (b.col1 - b.col0);
  });
  return used;
}

}  // namespace

extern "C" {

// y += scale * (x A^T) B for every segment and site that has chunks; everything else is left as it is.
void lp_add_lora(void* pool, bf16* y, i64 ldy, const bf16* x, i64 ldx, const LoraTables* tables,
                 const LoraSites* sites) {
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
  float* v = scratch.data();
  lp::Pieces shrink_pieces(shrinks.size(), 1), expand_pieces(expands.size(), 1);
  ((lp::Pool*)pool)->run([&](int) {
    i64 i, end;
    while (shrink_pieces.take(&i, &end)) shrink_item(shrink[i], x, ldx, tables->pool, sites->d_in, v);
    ((lp::Pool*)pool)->barrier();
    while (expand_pieces.take(&i, &end)) expand_item(expand[i], y, ldy, *tables, *sites, v);
  });
}

}  // extern "C"
