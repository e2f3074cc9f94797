// Paged attention through the AMX matrix unit: blocks of queries of one sequence against blocks of keys.
//
// A query is one head of one row; queries that share a KV head share its keys, so a block holds rows by heads. Softmax runs
// online over key blocks that lie at fixed positions of the sequence. A query's sums therefore depend on its own position
// alone: alone, beside others, in a prompt's chunk or in decoding it gets the same bits. A key block without a visible key
// leaves a query's state exactly as it was.
#pragma once

#include "common.h"

#if defined(__AMX_BF16__)

namespace amx {

const i64 kKeys = 128;        // keys of a block
const i64 kRows = 32;         // rows of one sequence that are worked on together
const i64 kMaxQueries = 512;  // rows by heads, at most

// Tiles: 0..3 sums, 4 left operand, 6 right operand.
inline void configure(int query_rows) {
  alignas(64) TileConfig c;
  for (int i = 0; i < 8; i++) c.rows[i] = i < 6 ? query_rows : 16, c.colsb[i] = 64;
  _tile_loadconfig(&c);
}

// 16 rows of 16 dwords, transposed.
inline void transpose_16x16(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Working memory of one thread.
struct Scratch {
  std::vector<bf16> queries, keys, values, weights;
  std::vector<float> scores, out, top, sum;

  void reserve(i64 num_queries, i64 head_dim) {
    const i64 padded = (num_queries + 15) / 16 * 16;
    grow(queries, padded * head_dim);
    grow(keys, kKeys * head_dim);
    grow(values, kKeys * head_dim);
    grow(weights, 16 * kKeys);
    grow(scores, 16 * kKeys);
    grow(out, padded * head_dim);
    grow(top, padded);
    grow(sum, padded);
  }

  template <class T>
  static void grow(std::vector<T>& v, i64 n) {
    if ((i64)v.size() < n) v.resize(n);
  }
};

// Where the keys of one sequence and KV head lie.
struct Keys {
  const bf16* pages;
  const int32_t* table;
  i64 page_stride, page_tokens, token_stride, head_dim, value_offset;

  const bf16* at(i64 token) const {
    return pages + table[token / page_tokens] * page_stride + token % page_tokens * token_stride;
  }
};

inline void ask_for_16(const Keys& k, const bf16* token) {
  for (int i = 0; i < 16; i++)
    for (i64 d = 0; d < k.head_dim; d += 32) _mm_prefetch((const char*)(token + i * k.token_stride + d), _MM_HINT_T0);
}

// Keys [first, first + 128) as right operands: for every 16 keys and 32 dims a tile of 16 dim pairs by 16 keys. Keys after
// `last` are left as they come: their scores are masked.
inline void pack_keys(const Keys& k, i64 first, i64 last, bf16* out) {
  for (i64 t = first; t < first + kKeys && t <= last; t += 16) {
    const bf16* token = k.at(t);
    ask_for_16(k, token + k.value_offset);  // wanted next
    if (t + 16 <= last) ask_for_16(k, k.at(t + 16));
    for (i64 d = 0; d < k.head_dim; d += 32, out += 512) {
      __m512i r[16];
      for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(token + i * k.token_stride + d);
      transpose_16x16(r);
      for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + i * 32, r[i]);
    }
  }
}

inline __m512i widen(const bf16* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }

// Values likewise: for every 32 keys and 16 dims a tile of 16 key pairs by 16 dims. Values after `last` are zero, whatever
// the page holds there.
inline void pack_values(const Keys& k, i64 first, i64 last, bf16* out) {
  for (i64 t = first; t < first + kKeys && t <= last; t += 32)
    for (i64 d = 0; d < k.head_dim; d += 16, out += 512)
      for (i64 pair = 0; pair < 16; pair++) {
        const i64 token = t + 2 * pair;
        __m512i both = _mm512_setzero_si512();
        if (token <= last) both = widen(k.at(token) + k.value_offset + d);
        if (token < last) both = _mm512_or_si512(both, _mm512_slli_epi32(widen(k.at(token + 1) + k.value_offset + d), 16));
        _mm512_storeu_si512(out + pair * 32, both);
      }
}

// scores [16][128] = queries [16][head_dim] times packed keys.
inline void score_tile(const bf16* queries, const bf16* keys, i64 head_dim, i64 num_keys, float* scores) {
  const i64 steps = head_dim / 32;
  for (i64 group = 0; group * 16 < num_keys; group += 2) {
    _tile_zero(0);
    _tile_zero(1);
    for (i64 s = 0; s < steps; s++) {
      _tile_loadd(4, queries + s * 32, head_dim * 2);
      _tile_loadd(6, keys + (group * steps + s) * 512, 64);
      _tile_dpbf16ps(0, 4, 6);
      if ((group + 1) * 16 < num_keys) {
        _tile_loadd(7, keys + ((group + 1) * steps + s) * 512, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
    }
    store_tile(0, scores + group * 16, kKeys * 4);
    if ((group + 1) * 16 < num_keys) store_tile(1, scores + (group + 1) * 16, kKeys * 4);
  }
}

// out [16][head_dim] += weights [16][128] times packed values.
inline void value_tile(const bf16* weights, const bf16* values, i64 head_dim, i64 num_keys, float* out) {
  const i64 columns = head_dim / 16;
  for (i64 c = 0; c < columns; c += 2) {
    _tile_loadd(0, out + c * 16, head_dim * 4);
    _tile_loadd(1, out + (c + 1) * 16, head_dim * 4);
    for (i64 t = 0; t * 32 < num_keys; t++) {
      _tile_loadd(4, weights + t * 32, kKeys * 2);
      _tile_loadd(6, values + (t * columns + c) * 512, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, values + (t * columns + c + 1) * 512, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    store_tile(0, out + c * 16, head_dim * 4);
    store_tile(1, out + (c + 1) * 16, head_dim * 4);
  }
}

// One query's softmax over keys [first, first + 128) of which it sees [from, to]. Scales what it has summed so far, writes
// the weights of this block.
inline void soften(const float* scores, i64 first, i64 from, i64 to, float scale, float cap, bf16* weights, float* out,
                   i64 head_dim, float* top, float* sum) {
  if (from > to) {
    for (i64 i = 0; i < kKeys; i += 32) _mm512_storeu_si512(weights + i, _mm512_setzero_si512());
    return;
  }
  __m512 s[kKeys / 16], high = _mm512_set1_ps(*top);
  for (int i = 0; i < kKeys / 16; i++) {
    const i64 t = first + i * 16;
    __mmask16 seen = to >= t ? tail_mask(to - t + 1) : (__mmask16)0;
    if (from > t) seen &= from - t < 16 ? (__mmask16)(0xffff << (from - t)) : (__mmask16)0;
    s[i] = _mm512_set1_ps(-INFINITY);
    if (seen) s[i] = _mm512_mask_mul_ps(s[i], seen, _mm512_loadu_ps(scores + i * 16), _mm512_set1_ps(scale));
    if (seen && cap > 0) s[i] = _mm512_mask_blend_ps(seen, s[i], soft_cap(s[i], cap));
    high = _mm512_max_ps(high, s[i]);
  }
  const float new_top = _mm512_reduce_max_ps(high);
  const __m512 m = _mm512_set1_ps(new_top);
  __m512 total = _mm512_setzero_ps();
  for (int i = 0; i < kKeys / 16; i++) {
    const __m512 p = exp_nonpositive(_mm512_sub_ps(s[i], m));
    total = _mm512_add_ps(total, p);
    store_bf16(weights + i * 16, p);
  }
  const float kept = *sum > 0 || *sum != *sum ? _mm512_cvtss_f32(exp_nonpositive(_mm512_set1_ps(*top - new_top))) : 0;
  *sum = *sum * kept + _mm512_reduce_add_ps(total);
  *top = new_top;
  for (i64 d = 0; d < head_dim; d += 16)
    _mm512_storeu_ps(out + d, _mm512_mul_ps(_mm512_loadu_ps(out + d), _mm512_set1_ps(kept)));
}

// Rows [0, rows) of one sequence, consecutive positions from `position` on, for the heads of one KV head.
inline void attend_block(const bf16* q, i64 ldq, bf16* out, i64 ldo, const Keys& keys, i64 rows, i64 groups, i64 position,
                         i64 window, float scale, float cap, Scratch& s) {
  const i64 head_dim = keys.head_dim, num = rows * groups, last = position + rows - 1;
  s.reserve(num, head_dim);
  for (i64 i = 0; i < num; i++) {
    memcpy(s.queries.data() + i * head_dim, q + i / groups * ldq + i % groups * head_dim, head_dim * sizeof(bf16));
    s.top[i] = -INFINITY, s.sum[i] = 0;
  }
  memset(s.out.data(), 0, num * head_dim * sizeof(float));
  const auto first_of = [&](i64 pos) { return window && pos >= window ? pos - window + 1 : (i64)0; };
  for (i64 first = first_of(position) / kKeys * kKeys; first <= last; first += kKeys) {
    const i64 num_keys = last - first + 1 < kKeys ? last - first + 1 : kKeys;
    pack_keys(keys, first, last, s.keys.data());
    pack_values(keys, first, last, s.values.data());
    for (i64 tile = 0; tile < num; tile += 16) {
      const int count = num - tile < 16 ? (int)(num - tile) : 16;
      configure(count);
      score_tile(s.queries.data() + tile * head_dim, s.keys.data(), head_dim, num_keys, s.scores.data());
      for (i64 i = 0; i < count; i++) {
        const i64 pos = position + (tile + i) / groups, from = first_of(pos);
        soften(s.scores.data() + i * kKeys, first, from > first ? from : first,
               pos < first + kKeys - 1 ? pos : first + kKeys - 1, scale, cap, s.weights.data() + i * kKeys,
               s.out.data() + (tile + i) * head_dim, head_dim, &s.top[tile + i], &s.sum[tile + i]);
      }
      value_tile(s.weights.data(), s.values.data(), head_dim, num_keys, s.out.data() + tile * head_dim);
    }
  }
  for (i64 i = 0; i < num; i++) {
    const __m512 inverse = _mm512_set1_ps(1.0f / s.sum[i]);
    bf16* to = out + i / groups * ldo + i % groups * head_dim;
    for (i64 d = 0; d < head_dim; d += 16)
      store_bf16(to + d, _mm512_mul_ps(_mm512_loadu_ps(s.out.data() + i * head_dim + d), inverse));
  }
}

}  // namespace amx

#endif
