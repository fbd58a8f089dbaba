// What the native operators for AVX2 share: see build.py for when they are used, library.py for their contracts in Python.
//
// Tensors in bfloat16 or float32, row-major, on processors with AVX2, FMA and F16C, which have no bfloat16 products:
// everything is computed in float32. Pointers are trusted: library.py checks every shape. Functions for float32 have the
// names of those for bfloat16 with `_float32` behind them.
//
// One arithmetic: each sum has one order, fixed by the model alone. It depends neither on how many rows there are, nor on
// which kernel computes a row, nor on threads. So a token has the same bits as part of a prompt, as part of an answer and
// in any company.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

using bf16 = uint16_t;
using i64 = int64_t;

constexpr i64 kVector = 8;  // float32 values in a register

inline float widened(float value) { return value; }
inline float widened(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

inline __m256 load(const float* p) { return _mm256_loadu_ps(p); }
inline __m256 load(const bf16* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

// To the nearest bfloat16, ties to even; every NaN becomes the same one.
inline void store(bf16* p, __m256 v) {
  const __m256i bits = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i half = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(half, half), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

inline void store(float* p, __m256 v) { _mm256_storeu_ps(p, v); }

inline float sum(__m256 v) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

inline float greatest(__m256 v) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// All ones in the first n lanes.
inline __m256 first_lanes(i64 n) {
  const __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n > kVector ? kVector : n)), places));
}

constexpr float kLog2E = 1.44269504f;

// 2^x for x <= 0, minus infinity included, to a relative error of 2e-7; 0 below 2^-126. 2^n times a minimax polynomial.
inline __m256 power_of_two(__m256 x) {
  x = _mm256_max_ps(x, _mm256_set1_ps(-127.0f));
  const __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm256_sub_ps(x, n);
  __m256 p = _mm256_set1_ps(1.327647141e-3f);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(9.675541571e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.550713277e-2f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(2.402211972e-1f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(6.931469671e-1f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(exponent));
}
