// Normalisation, rotary embedding and activation: what lies between the matrix products of a layer.

#include "bytes.h"

#include <cmath>

namespace {

// x += delta (unless null), then out = x / rms(x) * weight. x is float32. Rows of `width`, a multiple of 16.
template <typename T>
void norm(float* x, const T* delta, const T* weight, T* out, i64 rows, i64 width, float eps, i64 threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width > (1 << 15))
  for (i64 r = 0; r < rows; ++r) {
    float* row = x + r * width;
    __m256 squares = _mm256_setzero_ps();
    for (i64 i = 0; i < width; i += kVector) {
      Vector v = load(row + i);
      if (delta) store(row + i, v = v + load(delta + r * width + i));
      add_to(squares, v * v);
    }
    const Vector scale = all(1.0f / std::sqrt(sum(squares) / width + eps));
    for (i64 i = 0; i < width; i += kVector) store(out + r * width + i, load(row + i) * scale * load(weight + i));
  }
}

template <typename T>
void rotate_head(const T* from, const float* cosines, const float* sines, i64 half, T* to) {
  for (i64 i = 0; i < half; i += kVector) {
    const Vector cosine = load(cosines + i), sine = load(sines + i);
    const Vector a = load(from + i), b = load(from + half + i);
    store(to + i, multiply_subtract(a, cosine, b * sine));
    store(to + half + i, multiply_add(b, cosine, a * sine));
  }
}

// Turn q in place, turn k and store it and v in the pool. cos and sin: float32 [T, H / 2].
template <typename T>
void rotate(T* qkv, const float* cosines, const float* sines, const i64* slots, T* keys, T* values, i64 tokens, i64 num_heads,
            i64 num_kv_heads, i64 size, i64 threads) {
  const i64 half = size / 2, width = (num_heads + 2 * num_kv_heads) * size;
#pragma omp parallel for num_threads(threads) if (threads > 1 && tokens >= 32)
  for (i64 t = 0; t < tokens; ++t) {
    T* row = qkv + t * width;
    const i64 slot = slots[t] * num_kv_heads * size;
    for (i64 head = 0; head < num_heads + num_kv_heads; ++head) {
      const T* from = row + head * size;
      T* to = head < num_heads ? row + head * size : keys + slot + (head - num_heads) * size;
      rotate_head(from, cosines + t * half, sines + t * half, half, to);
    }
    std::memcpy(values + slot, row + (num_heads + num_kv_heads) * size, num_kv_heads * size * sizeof(T));
  }
}

// The same with a pool of bytes: k is turned in place, too.
template <typename T>
void rotate_to_bytes(T* qkv, const float* cosines, const float* sines, const i64* slots, byte* keys, byte* values, i64 tokens, i64 num_heads,
                     i64 num_kv_heads, i64 size, i64 threads) {
  const i64 half = size / 2, row_width = (num_heads + 2 * num_kv_heads) * size, width = head_width<byte>(size);
#pragma omp parallel for num_threads(threads) if (threads > 1 && tokens >= 32)
  for (i64 t = 0; t < tokens; ++t) {
    T* row = qkv + t * row_width;
    for (i64 head = 0; head < num_heads + num_kv_heads; ++head) {
      T* at = row + head * size;
      rotate_head(at, cosines + t * half, sines + t * half, half, at);
    }
    const T *new_keys = row + num_heads * size, *new_values = new_keys + num_kv_heads * size;
    for (i64 head = 0; head < num_kv_heads; ++head) {
      const i64 at = (slots[t] * num_kv_heads + head) * width;
      store_head(new_keys + head * size, size, keys + at);
      store_head(new_values + head * size, size, values + at);
    }
  }
}

// silu(gate) * up, where the first half of a row is the gate: [T, 2 I] to [T, I]. I is a multiple of 16.
template <typename T>
void gated(const T* gate_up, T* out, i64 rows, i64 width, i64 threads) {
  const Vector one = all(1.0f);
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width > (1 << 14))
  for (i64 r = 0; r < rows; ++r) {
    const T *gate = gate_up + 2 * r * width, *up = gate + width;
    for (i64 i = 0; i < width; i += kVector) {
      const Vector g = load(gate + i), e = power_of_two(magnitude(g) * all(-kLog2E));
      // sigmoid from e^-|g|, which can't overflow
      const Vector sigmoid = by_sign(g, e, one) / (e + one);
      store(out + r * width + i, g * sigmoid * load(up + i));
    }
  }
}

}  // namespace

extern "C" {

void add_rms_norm(float* x, const bf16* delta, const bf16* weight, bf16* out, i64 rows, i64 width, float eps, i64 threads) {
  norm(x, delta, weight, out, rows, width, eps, threads);
}

void rotate_and_store(bf16* qkv, const float* cosines, const float* sines, const i64* slots, bf16* keys, bf16* values, i64 tokens,
                      i64 num_heads, i64 num_kv_heads, i64 size, i64 threads) {
  rotate(qkv, cosines, sines, slots, keys, values, tokens, num_heads, num_kv_heads, size, threads);
}

void swiglu(const bf16* gate_up, bf16* out, i64 rows, i64 width, i64 threads) { gated(gate_up, out, rows, width, threads); }

void add_rms_norm_float32(float* x, const float* delta, const float* weight, float* out, i64 rows, i64 width, float eps, i64 threads) {
  norm(x, delta, weight, out, rows, width, eps, threads);
}

void rotate_and_store_float32(float* qkv, const float* cosines, const float* sines, const i64* slots, float* keys, float* values, i64 tokens,
                      i64 num_heads, i64 num_kv_heads, i64 size, i64 threads) {
  rotate(qkv, cosines, sines, slots, keys, values, tokens, num_heads, num_kv_heads, size, threads);
}

void swiglu_float32(const float* gate_up, float* out, i64 rows, i64 width, i64 threads) { gated(gate_up, out, rows, width, threads); }

void rotate_and_store_int8(bf16* qkv, const float* cosines, const float* sines, const i64* slots, byte* keys, byte* values, i64 tokens,
                           i64 num_heads, i64 num_kv_heads, i64 size, i64 threads) {
  rotate_to_bytes(qkv, cosines, sines, slots, keys, values, tokens, num_heads, num_kv_heads, size, threads);
}

void rotate_and_store_int8_float32(float* qkv, const float* cosines, const float* sines, const i64* slots, byte* keys, byte* values, i64 tokens,
                           i64 num_heads, i64 num_kv_heads, i64 size, i64 threads) {
  rotate_to_bytes(qkv, cosines, sines, slots, keys, values, tokens, num_heads, num_kv_heads, size, threads);
}

}  // extern "C"
