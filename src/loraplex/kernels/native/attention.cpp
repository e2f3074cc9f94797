// Paged attention and the fused operations around it.
#include "attention_amx.h"
#include "common.h"

extern "C" {

// KV pages of one layer: token t of a page, head h: pages + page * page_stride + (t * kv_heads + h) * head_dim, V at
// + value_offset. page_table [sequences][table_stride].
struct KvView {
  bf16* pages;  // already moved to the layer
  i64 page_stride, value_offset, page_tokens, kv_heads, head_dim;
  const int32_t* page_table;
  i64 table_stride;
};

}  // extern "C"

namespace {

// Sums of 16 vectors, one in each lane.
inline __m512 sum_each(const __m512* a) {
  __m512 u[4];
  for (int i = 0; i < 4; i++) {
    const __m512 p = _mm512_add_ps(_mm512_unpacklo_ps(a[4 * i], a[4 * i + 1]), _mm512_unpackhi_ps(a[4 * i], a[4 * i + 1]));
    const __m512 q =
        _mm512_add_ps(_mm512_unpacklo_ps(a[4 * i + 2], a[4 * i + 3]), _mm512_unpackhi_ps(a[4 * i + 2], a[4 * i + 3]));
    const __m512d pd = _mm512_castps_pd(p), qd = _mm512_castps_pd(q);
    u[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(pd, qd)), _mm512_castpd_ps(_mm512_unpackhi_pd(pd, qd)));
  }
  const __m512 s0 = _mm512_add_ps(_mm512_shuffle_f32x4(u[0], u[1], 0x88), _mm512_shuffle_f32x4(u[0], u[1], 0xdd));
  const __m512 s1 = _mm512_add_ps(_mm512_shuffle_f32x4(u[2], u[3], 0x88), _mm512_shuffle_f32x4(u[2], u[3], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(s0, s1, 0x88), _mm512_shuffle_f32x4(s0, s1, 0xdd));
}

// Ask for 16 vectors of one head that lie `stride` elements apart.
inline void prefetch_16(const bf16* p, i64 stride, i64 head_dim) {
  for (int t = 0; t < 16; t++)
    for (i64 d = 0; d < head_dim; d += 32) _mm_prefetch((const char*)(p + t * stride + d), _MM_HINT_T0);
}

// Products of one query head with 16 keys that lie `stride` elements apart.
inline __m512 scores_of_16(const bf16* q, const bf16* k, i64 stride, i64 head_dim) {
  __m512 acc[16];
  for (int t = 0; t < 16; t++) acc[t] = _mm512_setzero_ps();
  for (i64 d = 0; d < head_dim; d += 32) {
    const __mmask32 mask = head_dim - d >= 32 ? 0xffffffffu : (1u << (head_dim - d)) - 1;
    const __m512i qs = _mm512_maskz_loadu_epi16(mask, q + d);
    for (int t = 0; t < 16; t++) acc[t] = dot_bf16(acc[t], qs, _mm512_maskz_loadu_epi16(mask, k + t * stride + d));
  }
  return sum_each(acc);
}

// In place: scores[0..n) become probabilities up to their sum, which is returned. n is padded to 16 with -inf.
inline float exponentials(float* scores, i64 n) {
  __m512 top = _mm512_set1_ps(-INFINITY);
  for (i64 i = 0; i < n; i += 16) top = _mm512_max_ps(top, _mm512_loadu_ps(scores + i));
  const __m512 m = _mm512_set1_ps(_mm512_reduce_max_ps(top));
  __m512 sum = _mm512_setzero_ps();
  for (i64 i = 0; i < n; i += 16) {
    const __m512 p = exp_nonpositive(_mm512_sub_ps(_mm512_loadu_ps(scores + i), m));
    _mm512_storeu_ps(scores + i, p);
    sum = _mm512_add_ps(sum, p);
  }
  return _mm512_reduce_add_ps(sum);
}

struct Span {  // positions [first, last] of one sequence
  const int32_t* pages;
  i64 first, last;
};

// The key of one head at position t; its value lies value_offset further.
inline const bf16* kv_vectors(const KvView& kv, const Span& span, i64 t, i64 head) {
  return kv.pages + span.pages[t / kv.page_tokens] * kv.page_stride +
         ((t % kv.page_tokens) * kv.kv_heads + head) * kv.head_dim;
}

// out[g][d..d+64) = sum over positions of p[g][t] v[t][d..d+64), for G query heads.
template <int G>
inline void weighted_values(const KvView& kv, const Span& span, i64 head, i64 d, const float* p, i64 ldp,
                            const float* inverse, bf16* out) {
  __m512 acc[G][4];
  __mmask16 mask[4];
  for (int c = 0; c < 4; c++) {
    mask[c] = kv.head_dim - d - c * 16 > 0 ? tail_mask(kv.head_dim - d - c * 16) : (__mmask16)0;
    for (int g = 0; g < G; g++) acc[g][c] = _mm512_setzero_ps();
  }
  const i64 stride = kv.kv_heads * kv.head_dim, origin = span.first / 16 * 16;
  for (i64 t = span.first; t <= span.last;) {
    const i64 page_end = (t / kv.page_tokens + 1) * kv.page_tokens, stop = page_end - 1 < span.last ? page_end - 1 : span.last;
    const bf16* v = kv_vectors(kv, span, t, head) + kv.value_offset + d;
    for (; t <= stop; t++, v += stride)
      for (int c = 0; c < 4; c++) {
        const __m512 vs = load_bf16_masked(v + c * 16, mask[c]);
        for (int g = 0; g < G; g++) acc[g][c] = _mm512_fmadd_ps(_mm512_set1_ps(p[g * ldp + t - origin]), vs, acc[g][c]);
      }
  }
  for (int g = 0; g < G; g++)
    for (int c = 0; c < 4; c++)
      store_bf16_masked(out + g * kv.head_dim + c * 16, _mm512_mul_ps(acc[g][c], _mm512_set1_ps(inverse[g])), mask[c]);
}

// The query heads [0, groups) of one row that share one KV head.
inline void attend(const bf16* q, bf16* out, const KvView& kv, const Span& span, i64 head, i64 groups, float scale,
                   float cap, std::vector<float>& scratch) {
  const i64 stride = kv.kv_heads * kv.head_dim, origin = span.first / 16 * 16;
  const i64 ldp = (span.last - origin) / 16 * 16 + 16;
  if ((i64)scratch.size() < groups * ldp + groups) scratch.resize(groups * ldp + groups);
  float *p = scratch.data(), *inverse = p + groups * ldp;
  for (i64 t = origin; t <= span.last; t += 16) {
    const bf16* k = kv_vectors(kv, span, t, head);
    if (t + 16 <= span.last) prefetch_16(kv_vectors(kv, span, t + 16, head), stride, kv.head_dim);
    prefetch_16(k + kv.value_offset, stride, kv.head_dim);  // the values are wanted next
    __mmask16 live = tail_mask(span.last - t + 1);
    if (t < span.first) live &= (__mmask16)(0xffff << (span.first - t));
    for (i64 g = 0; g < groups; g++) {
      __m512 s = _mm512_mul_ps(scores_of_16(q + g * kv.head_dim, k, stride, kv.head_dim), _mm512_set1_ps(scale));
      if (cap > 0) s = soft_cap(s, cap);
      _mm512_storeu_ps(p + g * ldp + t - origin, _mm512_mask_blend_ps(live, _mm512_set1_ps(-INFINITY), s));
    }
  }
  for (i64 g = 0; g < groups; g++) inverse[g] = 1.0f / exponentials(p + g * ldp, ldp);
  for (i64 d = 0; d < kv.head_dim; d += 64) {
    i64 g = 0;
    for (; g + 3 <= groups; g += 3) weighted_values<3>(kv, span, head, d, p + g * ldp, ldp, inverse + g, out + g * kv.head_dim + d);
    for (; g < groups; g++) weighted_values<1>(kv, span, head, d, p + g * ldp, ldp, inverse + g, out + g * kv.head_dim + d);
  }
}

inline float row_rms(const bf16* x, i64 n, float eps) {
  __m512 sum = _mm512_setzero_ps();
  for (i64 i = 0; i < n; i += 16) {
    const __m512 v = load_bf16_masked(x + i, tail_mask(n - i));
    sum = _mm512_fmadd_ps(v, v, sum);
  }
  return 1.0f / sqrtf(_mm512_reduce_add_ps(sum) / n + eps);
}

// weight is bf16 or float.
template <class W>
inline void scale_row(const bf16* x, i64 n, float factor, const W* weight, bf16* out) {
  const __m512 f = _mm512_set1_ps(factor);
  for (i64 i = 0; i < n; i += 16) {
    const __mmask16 m = tail_mask(n - i);
    store_bf16_masked(out + i, _mm512_mul_ps(_mm512_mul_ps(load_bf16_masked(x + i, m), f), load_masked(weight + i, m)), m);
  }
}

// A row's RMS norm, from x to out; they may be the same.
inline void norm_row(const bf16* x, i64 n, float eps, const void* weight, int wide, bf16* out) {
  const float factor = row_rms(x, n, eps);
  if (wide)
    scale_row(x, n, factor, (const float*)weight, out);
  else
    scale_row(x, n, factor, (const bf16*)weight, out);
}

// Rotate one head: (a, b) -> (a cos - b sin, b cos + a sin), `half` dims apart; those after 2 half are copied.
inline void rotate(const bf16* x, const float* cosine, const float* sine, i64 half, i64 head_dim, bf16* out) {
  if (out != x) memcpy(out + 2 * half, x + 2 * half, (head_dim - 2 * half) * sizeof(bf16));
  for (i64 i = 0; i < half; i += 16) {
    const __mmask16 m = tail_mask(half - i);
    const __m512 a = load_bf16_masked(x + i, m), b = load_bf16_masked(x + half + i, m);
    const __m512 c = _mm512_maskz_loadu_ps(m, cosine + i), s = _mm512_maskz_loadu_ps(m, sine + i);
    store_bf16_masked(out + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)), m);
    store_bf16_masked(out + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)), m);
  }
}

}  // namespace

extern "C" {

// Causal attention of every row over the pages of its sequence, positions max(0, pos - window + 1) .. pos.
// q [rows][kv_heads * groups][head_dim] at row stride ldq; window 0 is no window, softcap 0 no soft cap of scores.
//
// With AMX, blocks of rows of one sequence; without, or for other head sizes, row by row.
void lp_attention(void* pool, const bf16* q, i64 ldq, bf16* out, i64 ldo, const KvView* kv, i64 q_heads,
                  const int32_t* row_seq, const int32_t* row_pos, i64 rows, i64 window, float scale, float softcap,
                  int has_amx) {
  const i64 groups = q_heads / kv->kv_heads;
  i64 work = 0;
  for (i64 r = 0; r < rows; r++) work += (row_pos[r] + 1) * q_heads * kv->head_dim;
#if defined(__AMX_BF16__)
  if (has_amx && kv->head_dim % 32 == 0 && kv->page_tokens % 16 == 0) {
    const i64 block_rows = groups * amx::kRows <= amx::kMaxQueries ? amx::kRows : 1;
    std::vector<i64> starts;  // first row of every block
    for (i64 r = 0; r < rows; r++) {
      const bool joins = r && row_seq[r] == row_seq[r - 1] && row_pos[r] == row_pos[r - 1] + 1 && r - starts.back() < block_rows;
      if (!joins) starts.push_back(r);
    }
    const i64 blocks = (i64)starts.size();
    starts.push_back(rows);
    lp::parallel_for((lp::Pool*)pool, blocks * kv->kv_heads, 1, work, [&](i64 begin, i64 end) {
      static thread_local amx::Scratch scratch;
      for (i64 item = begin; item < end; item++) {
        // Late blocks of a prompt see the most keys: they come first, so that none is left alone at the end.
        const i64 block = blocks - 1 - item / kv->kv_heads, head = item % kv->kv_heads, row = starts[block];
        const amx::Keys keys = {kv->pages + head * kv->head_dim, kv->page_table + row_seq[row] * kv->table_stride,
                                kv->page_stride, kv->page_tokens, kv->kv_heads * kv->head_dim, kv->head_dim,
                                kv->value_offset};
        const i64 first = head * groups * kv->head_dim;
        amx::attend_block(q + row * ldq + first, ldq, out + row * ldo + first, ldo, keys, starts[block + 1] - row, groups,
                          row_pos[row], window, scale, softcap, scratch);
      }
      _tile_release();
    });
    return;
  }
#endif
  lp::parallel_for((lp::Pool*)pool, rows * kv->kv_heads, 2, work, [&](i64 begin, i64 end) {
    static thread_local std::vector<float> scratch;
    for (i64 item = begin; item < end; item++) {
      const i64 row = item / kv->kv_heads, head = item % kv->kv_heads, pos = row_pos[row];
      const Span span = {kv->page_table + row_seq[row] * kv->table_stride, window && pos >= window ? pos - window + 1 : 0, pos};
      const i64 first = head * groups * kv->head_dim;
      attend(q + row * ldq + first, out + row * ldo + first, *kv, span, head, groups, scale, softcap, scratch);
    }
  });
}

// ------------------------------------------------------------------------------------------------ fused glue
// residual += delta (unless delta is null); out = residual / rms(residual) * weight. Weights are bf16, or float if wide.
void lp_add_rms_norm(void* pool, bf16* residual, const bf16* delta, const void* weight, int wide, bf16* out, i64 rows,
                     i64 n, float eps) {
  const auto row = [&](i64 r) {
    bf16* x = residual + r * n;
    for (i64 i = 0; delta && i < n; i += 16) {
      const __mmask16 m = tail_mask(n - i);
      store_bf16_masked(x + i, _mm512_add_ps(load_bf16_masked(x + i, m), load_bf16_masked(delta + r * n + i, m)), m);
    }
    norm_row(x, n, eps, weight, wide, out + r * n);
  };
  lp::parallel_for((lp::Pool*)pool, rows, 8, rows * n, [&](i64 begin, i64 end) {
    for (i64 r = begin; r < end; r++) row(r);
  });
}

// qkv [rows][(q_heads + 2 kv_heads) head_dim]: optional per-head norm of q and k, rotation, q in place, k and v to pages.
// cosine, sine [positions][half]; norms are bf16, or float if wide.
void lp_rope_and_store(void* pool, bf16* qkv, i64 ldqkv, const KvView* kv, i64 q_heads, const float* cosine,
                       const float* sine, i64 half, const void* q_norm, const void* k_norm, int wide, float eps,
                       const int32_t* row_seq, const int32_t* row_pos, i64 rows) {
  const i64 hd = kv->head_dim;
  const auto store_row = [&](i64 r) {
    const i64 pos = row_pos[r];
    const float *c = cosine + pos * half, *s = sine + pos * half;
    bf16* row = qkv + r * ldqkv;
    const i64 page = kv->page_table[row_seq[r] * kv->table_stride + pos / kv->page_tokens];
    bf16* keys = kv->pages + page * kv->page_stride + (pos % kv->page_tokens) * kv->kv_heads * hd;
    for (i64 h = 0; h < q_heads + kv->kv_heads; h++) {
      bf16* x = row + h * hd;
      const void* norm = h < q_heads ? q_norm : k_norm;
      if (norm) norm_row(x, hd, eps, norm, wide, x);
      rotate(x, c, s, half, hd, h < q_heads ? x : keys + (h - q_heads) * hd);
    }
    memcpy(keys + kv->value_offset, row + (q_heads + kv->kv_heads) * hd, kv->kv_heads * hd * sizeof(bf16));
  };
  lp::parallel_for((lp::Pool*)pool, rows, 8, rows * ldqkv, [&](i64 begin, i64 end) {
    for (i64 r = begin; r < end; r++) store_row(r);
  });
}

// out[r][i] = silu(gate_up[r][i]) * gate_up[r][n + i].
void lp_silu_and_mul(void* pool, const bf16* gate_up, bf16* out, i64 rows, i64 n) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const auto row = [&](i64 r) {
    for (i64 i = 0; i < n; i += 16) {
      const __mmask16 m = tail_mask(n - i);
      const __m512 g = load_bf16_masked(gate_up + r * 2 * n + i, m), u = load_bf16_masked(gate_up + r * 2 * n + n + i, m);
      const __mmask16 negative = _mm512_cmp_ps_mask(g, _mm512_setzero_ps(), _CMP_LT_OQ);
      const __m512 e = exp_nonpositive(_mm512_mask_sub_ps(g, (__mmask16)~negative, _mm512_setzero_ps(), g));  // exp(-|g|)
      const __m512 numerator = _mm512_mask_blend_ps(negative, g, _mm512_mul_ps(g, e));
      store_bf16_masked(out + r * n + i, _mm512_mul_ps(_mm512_div_ps(numerator, _mm512_add_ps(one, e)), u), m);
    }
  };
  lp::parallel_for((lp::Pool*)pool, rows, 2, 4 * rows * n, [&](i64 begin, i64 end) {
    for (i64 r = begin; r < end; r++) row(r);
  });
}

// out[r][i] = gelu(gate_up[r][i]) * gate_up[r][n + i]; 1 + tanh(u) is 2 sigmoid(2 u).
void lp_gelu_and_mul(void* pool, const bf16* gate_up, bf16* out, i64 rows, i64 n) {
  const __m512 linear = _mm512_set1_ps(1.5957691216057308f);  // 2 sqrt(2 / pi)
  const __m512 cubic = _mm512_set1_ps(1.5957691216057308f * 0.044715f);
  const auto row = [&](i64 r) {
    for (i64 i = 0; i < n; i += 16) {
      const __mmask16 m = tail_mask(n - i);
      const __m512 g = load_bf16_masked(gate_up + r * 2 * n + i, m), u = load_bf16_masked(gate_up + r * 2 * n + n + i, m);
      const __m512 inner = _mm512_mul_ps(g, _mm512_fmadd_ps(cubic, _mm512_mul_ps(g, g), linear));
      store_bf16_masked(out + r * n + i, _mm512_mul_ps(_mm512_mul_ps(g, sigmoid(inner)), u), m);
    }
  };
  lp::parallel_for((lp::Pool*)pool, rows, 2, 4 * rows * n, [&](i64 begin, i64 end) {
    for (i64 r = begin; r < end; r++) row(r);
  });
}

}  // extern "C"
