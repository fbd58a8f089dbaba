// What the operators in float32 share: see build.py for when they are used, library.py for their contracts in Python.
//
// Tensors in bfloat16 or float32, row-major, on processors with fused multiply-add: everything is computed in float32.
// vector.h is of the instruction set that they are compiled for. Pointers are trusted: library.py checks every shape.
// Functions for float32 have the names of those for bfloat16 with `_float32` behind them.
//
// One arithmetic: each sum has one order, fixed by the model alone. It depends neither on how many rows there are, nor on
// which kernel computes a row, nor on threads, nor on how many values a register holds. So a token has the same bits as part
// of a prompt, as part of an answer, in any company and on any of these processors.
#pragma once

#include <vector.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

using bf16 = uint16_t;
using i64 = int64_t;

// The sum of eight lanes.
inline float sum(__m256 v) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

constexpr i64 kChunk = 64;  // tokens of context whose scores are held at once

constexpr float kLog2E = 1.44269504f;

// 2^x for x <= 0, minus infinity included, to a relative error of 2e-7; 0 below 2^-126. 2^n times a minimax polynomial.
inline Vector power_of_two(Vector x) {
  x = larger(all(-127.0f), x);
  const Vector n = rounded(x), r = x - n;
  Vector p = all(1.327647141e-3f);
  for (const float c : {9.675541571e-3f, 5.550713277e-2f, 2.402211972e-1f, 6.931469671e-1f, 1.0f}) p = multiply_add(p, r, all(c));
  return p * power_of_whole(n);
}

// Call `use` with a constant number of rows, 1 to T, that is `rows`.
template <int T, typename Use>
void with_constant(i64 rows, const Use& use) {
  if constexpr (T > 1)
    if (rows < T) return with_constant<T - 1>(rows, use);
  use(std::integral_constant<int, T>());
}
