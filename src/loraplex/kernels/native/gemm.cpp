// Native CPU operations for bfloat16: AVX-512 (F, BW, VL, BF16) throughout, AMX for the dense product (this file).
//
// Plain C interface, no torch headers: built in seconds by native/build.py and called through ctypes. OpenMP symbols are
// resolved against the runtime that torch has already loaded, so both share one pool of threads.
//
// Every result row is computed in an order that depends on the row alone, never on how many rows or segments share the
// call: a request's bits do not change with its neighbours. Sums are kept in fp32.
#include "common.h"

extern "C" {

// ------------------------------------------------------------------------------------------------ capabilities
int lp_has_avx512_bf16() { return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw"); }

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
// Packed weight of W [n, k]: tiles of 16 columns by 32 k, [n/16][k/32][16 pairs of k][16 columns][2], zero padded.
i64 lp_packed_elems(i64 n, i64 k) { return ((n + 15) / 16) * ((k + 31) / 32) * 512; }

void lp_pack_weight(const bf16* w, i64 n, i64 k, bf16* out, int threads) {
  const i64 nblocks = (n + 15) / 16, kblocks = (k + 31) / 32;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 nb = 0; nb < nblocks; nb++)
    for (i64 kb = 0; kb < kblocks; kb++) {
      bf16* tile = out + (nb * kblocks + kb) * 512;
      for (i64 kk = 0; kk < 32; kk++)
        for (i64 nn = 0; nn < 16; nn++) {
          const i64 row = nb * 16 + nn, col = kb * 32 + kk;
          tile[(kk / 2) * 32 + nn * 2 + kk % 2] = (row < n && col < k) ? w[row * k + col] : 0;
        }
    }
}

#if defined(__AMX_BF16__)
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {0};
  uint16_t colsb[16] = {0};
  uint8_t rows[16] = {0};
};

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

// One block of at most 16 rows against `count` (1..4) neighbouring column blocks.
static inline void narrow_block(const bf16* x, i64 ldx, int rows, const bf16* w, i64 kblocks, int count, float* sums) {
  const i64 step = kblocks * 512;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (i64 kb = 0; kb < kblocks; kb++) {
    const bf16* tile = w + kb * 512;
    for (int j = 0; j < count; j++)  // the weights come from memory: ask for them four tiles ahead
      for (int line = 0; line < 16; line++)
        _mm_prefetch((const char*)(tile + j * step + 4 * 512 + line * 32), _MM_HINT_T0);
    _tile_loadd(4, x + kb * 32, ldx * 2);
    _tile_loadd(6, tile, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (count > 1) {
      _tile_loadd(7, tile + step, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (count > 2) {
      _tile_loadd(6, tile + 2 * step, 64);
      _tile_dpbf16ps(2, 4, 6);
    }
    if (count > 3) {
      _tile_loadd(7, tile + 3 * step, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, sums, 64);
  if (count > 1) _tile_stored(1, sums + 256, 64);
  if (count > 2) _tile_stored(2, sums + 512, 64);
  if (count > 3) _tile_stored(3, sums + 768, 64);
}

// Two blocks of rows against two column blocks; sums 0,1 belong to the first rows, 2,3 to the second.
static inline void square_block(const bf16* x, i64 ldx, const bf16* w0, const bf16* w1, i64 kblocks, float* sums) {
  const bf16* x1 = x + 16 * ldx;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (i64 kb = 0; kb < kblocks; kb++) {
    _tile_loadd(4, x + kb * 32, ldx * 2);
    _tile_loadd(6, w0 + kb * 512, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w1 + kb * 512, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, x1 + kb * 32, ldx * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
}

// All row blocks against column blocks [nb0, nb1). Rows beyond 16 go two blocks at a time.
static void gemm_columns(const bf16* x, i64 ldx, const bf16* w, const bf16* bias, void* y, i64 ldy, i64 m, i64 n,
                         i64 kblocks, i64 nb0, i64 nb1, int y_is_float) {
  alignas(64) float sums[1024];
  const i64 y_size = y_is_float ? 4 : 2;
  const i64 paired = m > 16 ? (m / 32) * 32 + (m % 32 > 16 ? 32 : 0) : 0;
  for (i64 r = 0; r < m && paired; r += 32) {
    const int m1 = m - r < 32 ? (int)(m - r - 16) : 16;
    if (m1 <= 0) break;
    if (r == 0 || m1 < 16) configure_tiles(16, m1);
    for (i64 nb = nb0; nb < nb1; nb += 2) {
      const i64 second = nb + 1 < nb1 ? nb + 1 : nb;
      square_block(x + r * ldx, ldx, w + nb * kblocks * 512, w + second * kblocks * 512, kblocks, sums);
      char* out = (char*)y + r * ldy * y_size;
      for (int j = 0; j < (second > nb ? 2 : 1); j++) {
        write_block(sums + j * 256, 16, (nb + j) * 16, n, bias, out, ldy, y_is_float);
        write_block(sums + (2 + j) * 256, m1, (nb + j) * 16, n, bias, out + 16 * ldy * y_size, ldy, y_is_float);
      }
    }
  }
  const i64 done = paired < m ? paired : m;
  if (done == m) return;
  const int rows = (int)(m - done);
  configure_tiles(rows, 0);
  for (i64 nb = nb0; nb < nb1; nb += 4) {
    const int count = nb1 - nb < 4 ? (int)(nb1 - nb) : 4;
    narrow_block(x + done * ldx, ldx, rows, w + nb * kblocks * 512, kblocks, count, sums);
    for (int j = 0; j < count; j++)
      write_block(sums + j * 256, rows, (nb + j) * 16, n, bias, (char*)y + done * ldy * y_size, ldy, y_is_float);
  }
}
#endif

// y [m, n] = x [m, k] W^T + bias. k must be a multiple of 32. y is bf16, or fp32 where y_is_float.
int lp_gemm(const bf16* x, i64 ldx, const bf16* packed, const bf16* bias, void* y, i64 ldy, i64 m, i64 n, i64 k,
            int y_is_float, int threads) {
#if defined(__AMX_BF16__)
  if (k % 32) return 1;
  const i64 nblocks = (n + 15) / 16, kblocks = k / 32;
#pragma omp parallel num_threads(threads)
  {
    i64 nb0, nb1;
    share(nblocks, omp_get_thread_num(), omp_get_num_threads(), &nb0, &nb1);
    if (nb0 < nb1) gemm_columns(x, ldx, packed, bias, y, ldy, m, n, kblocks, nb0, nb1, y_is_float);
    _tile_release();
  }
  return 0;
#else
  return 1;
#endif
}

}  // extern "C"
