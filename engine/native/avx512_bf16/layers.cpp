// Normalisation, rotary embedding and activation: what lies between the matrix products of a layer.

#include "whole_numbers.h"

#include <cmath>

namespace {

inline void rotate(const bf16* from, const float* cosines, const float* sines, i64 half, bf16* to) {
  for (i64 i = 0; i < half; i += kVector) {
    const __m512 cosine = _mm512_loadu_ps(cosines + i), sine = _mm512_loadu_ps(sines + i);
    const __m512 a = load(from + i), b = load(from + half + i);
    store(to + i, _mm512_fmsub_ps(a, cosine, _mm512_mul_ps(b, sine)));
    store(to + half + i, _mm512_fmadd_ps(b, cosine, _mm512_mul_ps(a, sine)));
  }
}

}  // namespace

extern "C" {

// x += delta (unless null), then out = x / rms(x) * weight. x is float32. Rows of `width`, a multiple of 16.
void add_rms_norm(float* x, const bf16* delta, const bf16* weight, bf16* out, i64 rows, i64 width, float eps, i64 threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width > (1 << 15))
  for (i64 r = 0; r < rows; ++r) {
    float* row = x + r * width;
    __m512 squares = _mm512_setzero_ps();
    for (i64 i = 0; i < width; i += kVector) {
      __m512 v = _mm512_loadu_ps(row + i);
      if (delta) {
        v = _mm512_add_ps(v, load(delta + r * width + i));
        _mm512_storeu_ps(row + i, v);
      }
      squares = _mm512_fmadd_ps(v, v, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / width + eps));
    for (i64 i = 0; i < width; i += kVector)
      store(out + r * width + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(row + i), scale), load(weight + i)));
  }
}

// Turn q in place, turn k and store it and v in the pool. cos and sin: float32 [T, H / 2].
void rotate_and_store(bf16* qkv, const float* cosines, const float* sines, const i64* slots, bf16* keys, bf16* values, i64 tokens,
                      i64 num_heads, i64 num_kv_heads, i64 size, i64 threads) {
  const i64 half = size / 2, width = (num_heads + 2 * num_kv_heads) * size;
#pragma omp parallel for num_threads(threads) if (threads > 1 && tokens >= 32)
  for (i64 t = 0; t < tokens; ++t) {
    bf16* row = qkv + t * width;
    const i64 slot = slots[t] * num_kv_heads * size;
    for (i64 head = 0; head < num_heads + num_kv_heads; ++head) {
      const bf16* from = row + head * size;
      bf16* to = head < num_heads ? row + head * size : keys + slot + (head - num_heads) * size;
      rotate(from, cosines + t * half, sines + t * half, half, to);
    }
    std::memcpy(values + slot, row + (num_heads + num_kv_heads) * size, num_kv_heads * size * sizeof(bf16));
  }
}

// The same with a pool of eight bits: [slots, K, H + 2] bytes.
void rotate_and_store_int8(bf16* qkv, const float* cosines, const float* sines, const i64* slots, byte* keys, byte* values, i64 tokens,
                           i64 num_heads, i64 num_kv_heads, i64 size, i64 threads) {
  const i64 half = size / 2, row_width = (num_heads + 2 * num_kv_heads) * size, width = size + kScale;
#pragma omp parallel for num_threads(threads) if (threads > 1 && tokens >= 32)
  for (i64 t = 0; t < tokens; ++t) {
    bf16* row = qkv + t * row_width;
    for (i64 head = 0; head < num_heads + num_kv_heads; ++head) {
      bf16* at = row + head * size;
      rotate(at, cosines + t * half, sines + t * half, half, at);
    }
    const bf16 *new_keys = row + num_heads * size, *new_values = new_keys + num_kv_heads * size;
    for (i64 head = 0; head < num_kv_heads; ++head) {
      const i64 at = (slots[t] * num_kv_heads + head) * width;
      store_head(new_keys + head * size, size, keys + at);
      store_head(new_values + head * size, size, values + at);
    }
  }
}

// silu(gate) * up, where the first half of a row is the gate: [T, 2 I] to [T, I]. I is a multiple of 16.
void swiglu(const bf16* gate_up, bf16* out, i64 rows, i64 width, i64 threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width > (1 << 14))
  for (i64 r = 0; r < rows; ++r) {
    const bf16 *gate = gate_up + 2 * r * width, *up = gate + width;
    for (i64 i = 0; i < width; i += kVector) {
      const __m512 g = load(gate + i), e = power_of_two(_mm512_mul_ps(_mm512_abs_ps(g), _mm512_set1_ps(-kLog2E)));
      // sigmoid from e^-|g|, which can't overflow
      const __m512 bottom = _mm512_add_ps(e, _mm512_set1_ps(1.0f));
      const __mmask16 negative = _mm512_cmp_ps_mask(g, _mm512_setzero_ps(), _CMP_LT_OQ);
      const __m512 top = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), negative, e);
      store(out + r * width + i, _mm512_mul_ps(_mm512_mul_ps(g, _mm512_div_ps(top, bottom)), load(up + i)));
    }
  }
}

}  // extern "C"
