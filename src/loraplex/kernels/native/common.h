// What the native CPU operations share: bf16 loads and stores, exp.
#pragma once

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <vector>

#include "threads.h"

typedef uint16_t bf16;
typedef int64_t i64;

namespace {

inline __m512 load_bf16(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline void store_bf16(bf16* p, __m512 v) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(v)); }
inline __mmask16 tail_mask(i64 n) { return n >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << n) - 1); }
inline __m512 load_bf16_masked(const bf16* p, __mmask16 m) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p)), 16));
}
inline void store_bf16_masked(bf16* p, __m512 v, __mmask16 m) {
  _mm256_mask_storeu_epi16(p, m, (__m256i)_mm512_cvtneps_pbh(v));
}
inline __m512 dot_bf16(__m512 acc, __m512i a, __m512i b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }

// exp(x) for x <= 0, relative error about 2e-7; below -87 it is 0; NaN stays NaN.
inline __m512 exp_nonpositive(__m512 x) {
  const __mmask16 live = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLE_UQ);
  const __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f));
  const __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.0f / 720.0f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(live, p, n);
}

inline __m512 load_masked(const bf16* p, __mmask16 m) { return load_bf16_masked(p, m); }
inline __m512 load_masked(const float* p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }

// 1 / (1 + exp(-x)); NaN stays NaN.
inline __m512 sigmoid(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  const __m512 e = exp_nonpositive(_mm512_mask_sub_ps(x, (__mmask16)~negative, _mm512_setzero_ps(), x));  // exp(-|x|)
  return _mm512_div_ps(_mm512_mask_blend_ps(negative, one, e), _mm512_add_ps(one, e));
}

// cap * tanh(x / cap), off by at most about 2e-7 cap; NaN stays NaN.
inline __m512 soft_cap(__m512 x, float cap) {
  const __m512 one = _mm512_set1_ps(1.0f), sign = _mm512_set1_ps(-0.0f);
  const __m512 e = exp_nonpositive(_mm512_mul_ps(_mm512_or_ps(x, sign), _mm512_set1_ps(2.0f / cap)));  // exp(-2|x|/cap)
  const __m512 t = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
  return _mm512_mul_ps(_mm512_or_ps(t, _mm512_and_ps(x, sign)), _mm512_set1_ps(cap));
}

#if defined(__AMX_BF16__)
// What _tile_loadconfig reads: rows and bytes a row of each tile.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {0};
  uint16_t colsb[16] = {0};
  uint8_t rows[16] = {0};
};

// Write one of the tiles 0..3, rows `stride` bytes apart. The tile's number is part of the instruction.
inline void store_tile(int tile, float* to, i64 stride) {
  switch (tile) {
    case 0: _tile_stored(0, to, stride); break;
    case 1: _tile_stored(1, to, stride); break;
    case 2: _tile_stored(2, to, stride); break;
    default: _tile_stored(3, to, stride);
  }
}
#endif

}  // namespace
