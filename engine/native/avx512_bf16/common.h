// What the native operators share: see build.py for when they are used, library.py for their contracts in Python.
//
// bfloat16 tensors, row-major, on processors with AVX-512 and its bfloat16 products, or AMX. Pointers are trusted:
// library.py checks every shape. Sums are in float32 and in an order that depends on the row alone, never on how many rows there
// are, on the threads, or on where a block lies: a row has the same bits in any company.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

using bf16 = uint16_t;
using i64 = int64_t;

constexpr i64 kVector = 16;      // float32 values in a register
constexpr i64 kChunk = 128;      // tokens of context whose scores are held at once
constexpr i64 kTileTokens = 16;  // tokens of a prompt that go through the context together
constexpr i64 kAsRead = 16;      // rows that look at a context as it is read; for more it is packed first

inline __m512 load(const bf16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline void store(bf16* p, __m512 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
}

inline __m512bh load_pairs(const void* p) { return (__m512bh)_mm512_loadu_si512(p); }

// The same two neighbouring values in every lane.
inline __m512bh repeat_pair(const bf16* p) {
  int pair;
  std::memcpy(&pair, p, sizeof pair);
  return (__m512bh)_mm512_set1_epi32(pair);
}

// What a product does besides, with each pair of inputs: nothing.
struct Nothing {
  void operator()() const {}
};

inline __mmask16 first_lanes(i64 n) {
  return static_cast<__mmask16>(_bzhi_u32(0xffff, static_cast<unsigned>(n < 0 ? 0 : n > kVector ? kVector : n)));
}

constexpr float kLog2E = 1.44269504f;

// 2^x for x <= 0, minus infinity included, to a relative error of 2e-7: 2^n times a minimax polynomial. Of any other x, something.
inline __m512 power_of_two(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);  // the second where one is no number
  const __m512 r = _mm512_reduce_ps(x, 0), n = _mm512_sub_ps(x, r);
  __m512 p = _mm512_set1_ps(1.327647141e-3f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.675541571e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.550713277e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.402211972e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931469671e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}
