// Native CPU operations for bfloat16: AVX-512 (F, BW, VL, BF16) throughout, AMX for the dense product (this file).
//
// Plain C interface, no torch headers: built in seconds by native/build.py and called through ctypes.
//
// Every result row is computed in an order that depends on the row alone, never on how many rows or segments share the
// call: a request's bits do not change with its neighbours. Sums are kept in fp32.
#include "common.h"

extern "C" {

// ------------------------------------------------------------------------------------------------ threads
void* lp_pool_new(int threads) { return new lp::Pool(threads); }
void lp_pool_free(void* pool) { delete (lp::Pool*)pool; }

// ------------------------------------------------------------------------------------------------ capabilities
// Ask the kernel for the AMX tile registers (once a process). 1 if they may be used.
int lp_has_amx() {
#if defined(__AMX_BF16__) && defined(__x86_64__)
  const long arch_req_xcomp_perm = 0x1023, xfeature_xtiledata = 18;
  return syscall(SYS_arch_prctl, arch_req_xcomp_perm, xfeature_xtiledata) == 0;
#else
  return 0;
#endif
}

// ------------------------------------------------------------------------------------------------ dense product
// Packed weight of W [n, k]: panels of 32 columns, each a stream of tile pairs along k. A tile is 16 columns by 32 k,
// [n/32][k/32][2][16 pairs of k][16 columns][2], zero padded.
i64 lp_packed_elems(i64 n, i64 k) { return ((n + 31) / 32) * ((k + 31) / 32) * 1024; }

void lp_pack_weight(void* pool, const bf16* w, i64 n, i64 k, bf16* out) {
  const i64 nblocks = (n + 31) / 32 * 2, kblocks = (k + 31) / 32;
  const auto pack = [&](i64 nb) {
    for (i64 kb = 0; kb < kblocks; kb++) {
      bf16* tile = out + ((nb / 2 * kblocks + kb) * 2 + nb % 2) * 512;
      for (i64 kk = 0; kk < 32; kk++)
        for (i64 nn = 0; nn < 16; nn++) {
          const i64 row = nb * 16 + nn, col = kb * 32 + kk;
          tile[(kk / 2) * 32 + nn * 2 + kk % 2] = (row < n && col < k) ? w[row * k + col] : 0;
        }
    }
  };
  lp::parallel_for((lp::Pool*)pool, nblocks, 2, n * k, [&](i64 begin, i64 end) {
    for (i64 nb = begin; nb < end; nb++) pack(nb);
  });
}

#if defined(__AMX_BF16__)
// Tiles 0..3 sums, 4..5 rows of x, 6..7 weights. m0 and m1 are the rows of the first and second block of x.
static void configure_tiles(int m0, int m1) {
  alignas(64) TileConfig c;
  const int rows[8] = {m0, m0, m1 ? m1 : m0, m1 ? m1 : m0, m0, m1 ? m1 : m0, 16, 16};
  for (int i = 0; i < 8; i++) c.rows[i] = rows[i], c.colsb[i] = 64;
  _tile_loadconfig(&c);
}

// Write a 16-column block of fp32 sums to y (bf16 or fp32), adding the bias.
static inline void write_block(const float* sums, int rows, i64 col, i64 n, const bf16* bias, void* y, i64 ldy,
                               int y_is_float) {
  if (col >= n) return;
  const __mmask16 mask = tail_mask(n - col);
  const __m512 b = bias ? load_bf16_masked(bias + col, mask) : _mm512_setzero_ps();
  for (int i = 0; i < rows; i++) {
    const __m512 v = _mm512_add_ps(_mm512_load_ps(sums + i * 16), b);
    if (y_is_float)
      _mm512_mask_storeu_ps((float*)y + i * ldy + col, mask, v);
    else
      store_bf16_masked((bf16*)y + i * ldy + col, v, mask);
  }
}

// Weights come from memory, faster when asked for four tile pairs ahead: 12.8 instead of 18.1 ms for the 120 linears of
// SmolLM2-135M at 16 rows on 2 cores of a Xeon with AMX.
static inline void prefetch_pair(const bf16* tiles) {
  for (int line = 0; line < 32; line++) _mm_prefetch((const char*)(tiles + 4 * 1024 + line * 32), _MM_HINT_T0);
}

// One block of at most 16 rows against one or two panels.
static inline void narrow_block(const bf16* x, i64 ldx, const bf16* w, i64 kblocks, int panels, float* sums) {
  const i64 step = kblocks * 1024;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (i64 kb = 0; kb < kblocks; kb++) {
    const bf16* tiles = w + kb * 1024;
    prefetch_pair(tiles);
    _tile_loadd(4, x + kb * 32, ldx * 2);
    _tile_loadd(6, tiles, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, tiles + 512, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (panels > 1) {
      prefetch_pair(tiles + step);
      _tile_loadd(6, tiles + step, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, tiles + step + 512, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  for (int i = 0; i < 2 * panels; i++) store_tile(i, sums + i * 256, 64);
}

// Two blocks of rows against one panel; sums 0,1 belong to the first rows, 2,3 to the second.
static inline void square_block(const bf16* x, i64 ldx, const bf16* w, i64 kblocks, float* sums) {
  const bf16* x1 = x + 16 * ldx;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (i64 kb = 0; kb < kblocks; kb++) {
    _tile_loadd(4, x + kb * 32, ldx * 2);
    _tile_loadd(6, w + kb * 1024, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + kb * 1024 + 512, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, x1 + kb * 32, ldx * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  for (int i = 0; i < 4; i++) store_tile(i, sums + i * 256, 64);
}

// All rows against panels [p0, p1). Two blocks of 16 rows at a time while more than 16 are left.
static void gemm_panels(const bf16* x, i64 ldx, const bf16* w, const bf16* bias, void* y, i64 ldy, i64 m, i64 n,
                        i64 kblocks, i64 p0, i64 p1, int y_is_float) {
  alignas(64) float sums[1024];
  const i64 y_size = y_is_float ? 4 : 2, panel = kblocks * 1024;
  i64 r = 0;
  for (int configured = 0; m - r > 16; r += 32) {
    const int m1 = m - r < 32 ? (int)(m - r - 16) : 16;
    if (configured != m1) configure_tiles(16, m1), configured = m1;
    char* out = (char*)y + r * ldy * y_size;
    for (i64 p = p0; p < p1; p++) {
      square_block(x + r * ldx, ldx, w + p * panel, kblocks, sums);
      for (int j = 0; j < 2; j++) {
        write_block(sums + j * 256, 16, p * 32 + j * 16, n, bias, out, ldy, y_is_float);
        write_block(sums + (2 + j) * 256, m1, p * 32 + j * 16, n, bias, out + 16 * ldy * y_size, ldy, y_is_float);
      }
    }
  }
  if (r >= m) return;
  const int rows = (int)(m - r);
  configure_tiles(rows, 0);
  for (i64 p = p0; p < p1; p += 2) {
    const int panels = p1 - p < 2 ? 1 : 2;
    narrow_block(x + r * ldx, ldx, w + p * panel, kblocks, panels, sums);
    for (int j = 0; j < 2 * panels; j++)
      write_block(sums + j * 256, rows, p * 32 + j * 16, n, bias, (char*)y + r * ldy * y_size, ldy, y_is_float);
  }
}
#endif

// y [m, n] = x [m, k] W^T + bias. k must be a multiple of 32. y is bf16, or fp32 where y_is_float.
int lp_gemm(void* pool, const bf16* x, i64 ldx, const bf16* packed, const bf16* bias, void* y, i64 ldy, i64 m, i64 n,
            i64 k, int y_is_float) {
#if defined(__AMX_BF16__)
  if (k % 32) return 1;
  const i64 panels = (n + 31) / 32, kblocks = k / 32;
  lp::Pool* threads = (lp::Pool*)pool;
  const i64 share = panels / (threads->size() * 4) / 2 * 2;
  lp::Pieces pieces(panels, share < 2 ? 2 : share);
  threads->run([&](int) {
    for (i64 begin, end; pieces.take(&begin, &end);)
      gemm_panels(x, ldx, packed, bias, y, ldy, m, n, kblocks, begin, end, y_is_float);
    _tile_release();
  });
  return 0;
#else
  return 1;
#endif
}

}  // extern "C"
