// A register of float32 values, for AVX-512.
#pragma once

#include <immintrin.h>
#include <transpose.h>

#include <cstdint>

constexpr int64_t kVector = 16;  // values in a register
constexpr int kTile = 12;        // rows that are multiplied together: 12 of 32 registers hold their sums, 12 those of a group
constexpr int kFourBitTile = kTile;  // the same while four bits are taken out of words
// Groups of a row's inputs that are summed side by side, at most.
constexpr int kFourBitGroups = 3, kEightBitGroups = 3;

using Vector = __m512;
using Words = __m512i;

inline Vector all(float value) { return _mm512_set1_ps(value); }
inline Vector load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vector v) { _mm512_storeu_ps(p, v); }
inline Words load_words(const void* p) { return _mm512_loadu_si512(p); }
inline Vector from_float16(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
inline Vector from_words(Words v) { return _mm512_cvtepi32_ps(v); }
inline Vector as_floats(Words v) { return _mm512_castsi512_ps(v); }
inline Words as_words(Vector v) { return _mm512_castps_si512(v); }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline Vector multiply_subtract(Vector a, Vector b, Vector c) { return _mm512_fmsub_ps(a, b, c); }
// The second where one is no number.
inline Vector larger(Vector a, Vector b) { return _mm512_max_ps(a, b); }
inline Vector rounded(Vector v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT); }
inline Vector magnitude(Vector v) { return _mm512_abs_ps(v); }

// Lanes of `a` where v has its sign set, and of `b` elsewhere.
inline Vector by_sign(Vector v, Vector a, Vector b) { return _mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(v)), b, a); }

// 2^n, of whole numbers from -127 on, which gives 0.
inline Vector power_of_whole(Vector n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}

// The first n lanes, and `other` in the rest.
inline Vector first_lanes(Vector v, int64_t n, float other) {
  return n >= kVector ? v : _mm512_mask_blend_ps(static_cast<__mmask16>((1u << n) - 1), all(other), v);
}

inline float first(Vector v) { return _mm512_cvtss_f32(v); }

inline float greatest(Vector v) { return _mm512_reduce_max_ps(v); }

// Add values to eight sums, in order: sums over a row have eight lanes, however many a register has.
inline void add_to(__m256& sums, Vector v) {
  sums = _mm256_add_ps(_mm256_add_ps(sums, _mm512_castps512_ps256(v)), _mm512_extractf32x8_ps(v, 1));
}

// bfloat16 values.
inline Vector load(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// To the nearest bfloat16, ties to even; every NaN becomes the same one.
inline void store(uint16_t* p, Vector v) {
  const __m512i bits = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i half = _mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(half));
}

// The four bits at `place` of each word, by a look-up that reads no more than four.
inline Vector nibbles(Words v, int place) {
  const Vector values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_permutexvar_ps(_mm512_srli_epi32(v, place), values);
}

// The signed byte at `place` of each word.
inline Vector bytes(Words v, int place) { return from_words(_mm512_srai_epi32(_mm512_slli_epi32(v, 24 - place), 24)); }

// The same byte without a sign.
inline Vector unsigned_bytes(Words v, int place) { return from_words(_mm512_and_si512(_mm512_srli_epi32(v, place), _mm512_set1_epi32(255))); }

// Bytes without a sign.
inline Vector load(const uint8_t* p) {
  return from_words(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// The lower or the upper half of each word, a bfloat16.
inline Vector halves(Words v, bool upper) {
  return as_floats(upper ? _mm512_and_si512(v, _mm512_set1_epi32(0xffff0000)) : _mm512_slli_epi32(v, 16));
}
