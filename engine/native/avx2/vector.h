// A register of float32 values, for AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>

constexpr int64_t kVector = 8;  // values in a register
constexpr int kTile = 6;        // rows that are multiplied together: 12 of 16 registers hold their sums
constexpr int kFourBitTile = 5;  // the same while four bits are taken out of words, which needs registers as well
// Groups of a row's inputs that are summed side by side, at most: with more, weights come from memory more slowly.
constexpr int kFourBitGroups = 2, kEightBitGroups = 1;

using Vector = __m256;
using Words = __m256i;

inline Vector all(float value) { return _mm256_set1_ps(value); }
inline Vector load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vector v) { _mm256_storeu_ps(p, v); }
inline Words load_words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline Vector from_float16(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
inline Vector from_words(Words v) { return _mm256_cvtepi32_ps(v); }
inline Vector as_floats(Words v) { return _mm256_castsi256_ps(v); }
inline Words as_words(Vector v) { return _mm256_castps_si256(v); }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline Vector multiply_subtract(Vector a, Vector b, Vector c) { return _mm256_fmsub_ps(a, b, c); }
// The second where one is no number.
inline Vector larger(Vector a, Vector b) { return _mm256_max_ps(a, b); }
inline Vector rounded(Vector v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vector magnitude(Vector v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v); }

// Lanes of `a` where v has its sign set, and of `b` elsewhere.
inline Vector by_sign(Vector v, Vector a, Vector b) { return _mm256_blendv_ps(b, a, v); }

// 2^n, of whole numbers from -127 on, which gives 0.
inline Vector power_of_whole(Vector n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}

// The first n lanes, and `other` in the rest.
inline Vector first_lanes(Vector v, int64_t n, float other) {
  const __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), count = _mm256_set1_epi32(static_cast<int>(n > kVector ? kVector : n));
  return _mm256_blendv_ps(all(other), v, as_floats(_mm256_cmpgt_epi32(count, places)));
}

inline float first(Vector v) { return _mm256_cvtss_f32(v); }

inline float greatest(Vector v) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// Add values to eight sums, in order: sums over a row have eight lanes, however many a register has.
inline void add_to(__m256& sums, Vector v) { sums = _mm256_add_ps(sums, v); }

// bfloat16 values.
inline Vector load(const uint16_t* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

// To the nearest bfloat16, ties to even; every NaN becomes the same one.
inline void store(uint16_t* p, Vector v) {
  const __m256i bits = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i half = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(half, half), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

// The four bits at `place` of each word.
inline Vector nibbles(Words v, int place) { return from_words(_mm256_and_si256(_mm256_srli_epi32(v, place), _mm256_set1_epi32(15))); }

// The signed byte at `place` of each word.
inline Vector bytes(Words v, int place) { return from_words(_mm256_srai_epi32(_mm256_slli_epi32(v, 24 - place), 24)); }

// The same byte without a sign.
inline Vector unsigned_bytes(Words v, int place) { return from_words(_mm256_and_si256(_mm256_srli_epi32(v, place), _mm256_set1_epi32(255))); }

// Bytes without a sign.
inline Vector load(const uint8_t* p) {
  return from_words(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// The lower or the upper half of each word, a bfloat16.
inline Vector halves(Words v, bool upper) {
  return as_floats(upper ? _mm256_and_si256(v, _mm256_set1_epi32(0xffff0000)) : _mm256_slli_epi32(v, 16));
}

// Rows of words become columns.
inline void transpose(Words v[8]) {
  Words lanes[8];  // [4 q + j]: in each half, word j of it of the rows 4 q to 4 q + 3
  for (int i = 0; i < 8; i += 4) {
    const Words a = _mm256_unpacklo_epi32(v[i], v[i + 1]), b = _mm256_unpackhi_epi32(v[i], v[i + 1]);
    const Words c = _mm256_unpacklo_epi32(v[i + 2], v[i + 3]), d = _mm256_unpackhi_epi32(v[i + 2], v[i + 3]);
    lanes[i] = _mm256_unpacklo_epi64(a, c);
    lanes[i + 1] = _mm256_unpackhi_epi64(a, c);
    lanes[i + 2] = _mm256_unpacklo_epi64(b, d);
    lanes[i + 3] = _mm256_unpackhi_epi64(b, d);
  }
  for (int j = 0; j < 4; ++j) {
    v[j] = _mm256_permute2x128_si256(lanes[j], lanes[4 + j], 0x20);
    v[4 + j] = _mm256_permute2x128_si256(lanes[j], lanes[4 + j], 0x31);
  }
}
