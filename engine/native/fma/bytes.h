// Numbers as eight bits with a common scale, as the pool holds them.
//
// A head is H bytes, each 128 more than the whole number that it stands for, and a bfloat16 behind them that all are multiplied
// by. It is no number where one of the values was none, or infinite.
#pragma once

#include "common.h"

#include <algorithm>
#include <type_traits>

namespace {

using byte = uint8_t;

constexpr i64 kScale = 2;               // bytes of a scale
constexpr float kLeast = 1e-30f;        // magnitudes below it count as zero
constexpr float kMostScale = 0x1p121f;  // 127 times a larger scale would be infinite as bfloat16
constexpr float kBytes = 127.0f;        // the largest magnitude in eight bits

// Values of the pool's type that a head of H takes.
template <typename S>
constexpr i64 head_width(i64 size) {
  return std::is_same_v<S, byte> ? size + kScale : size;
}

inline float scale_of(const byte* head, i64 size) {
  bf16 half;
  std::memcpy(&half, head + size, kScale);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return scale;
}

// What bytes stand for.
inline Vector value_of(Vector bytes, Vector scales) { return (bytes - all(128.0f)) * scales; }

// The scale of a head whose largest magnitude this is, before it becomes a bfloat16.
inline float scale_for(float largest) {
  return largest < kLeast ? 0.0f : std::min(largest / kBytes, kMostScale);  // the first where it is no number
}

// `size` values as a head in the pool.
template <typename T>
inline void store_head(const T* from, i64 size, byte* to) {
  Vector top = all(0.0f);
  __m256 nothing = _mm256_setzero_ps();
  for (i64 i = 0; i < size; i += kVector) {
    const Vector v = load(from + i);
    top = larger(magnitude(v), top);
    add_to(nothing, v * all(0.0f));
  }
  const float largest = greatest(top) + sum(nothing);
  bf16 scales[kVector];
  store(scales, all(scale_for(largest)));
  std::memcpy(to + size, scales, kScale);
  const float scale = scale_of(to, size);
  const Vector inverse = all(scale > 0.0f ? 1.0f / scale : 0.0f);
  for (i64 i = 0; i < size; i += kVector) {
    alignas(64) float whole[kVector];
    store(whole, larger(rounded(load(from + i) * inverse), all(-kBytes)) + all(128.0f));
    for (i64 j = 0; j < kVector; ++j) to[i + j] = static_cast<byte>(std::min(whole[j], 255.0f));
  }
}

}  // namespace
