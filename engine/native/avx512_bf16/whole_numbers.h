// Numbers as eight bits with a common scale, as the pool holds them, and as sixteen bits that are multiplied with those.
#pragma once

#include "common.h"

#include <algorithm>
#include <limits>

namespace {

using byte = uint8_t;

constexpr float kLeast = 1e-30f;        // magnitudes below it count as zero
constexpr float kMostScale = 0x1p121f;  // 127 times a larger scale would be infinite as bfloat16
constexpr float kBytes = 127.0f;        // the largest magnitude in eight bits
constexpr float kWhole = 32512.0f;      // in sixteen: 127 * 256, so that both bytes are signed
constexpr i64 kScale = 2;               // bytes of a scale, a bfloat16, behind the H bytes of a head

// The scale of a head whose largest magnitude this is, before it becomes a bfloat16.
inline float scale_for(float largest) {
  return largest < kLeast ? 0.0f : std::min(largest / kBytes, kMostScale);  // the first where it is no number
}

// The largest magnitude of `size` values, a multiple of 16; not a number where one of them is infinite or no number.
inline float largest_magnitude(const bf16* from, i64 size) {
  __m512 top = _mm512_setzero_ps(), nothing = _mm512_setzero_ps();
  for (i64 i = 0; i < size; i += kVector) {
    const __m512 v = load(from + i);
    top = _mm512_max_ps(top, _mm512_abs_ps(v));
    nothing = _mm512_fmadd_ps(v, _mm512_setzero_ps(), nothing);
  }
  return _mm512_reduce_max_ps(top) + _mm512_reduce_add_ps(nothing);
}

// `size` values as a head in the pool: each a byte, 128 more than the whole number that is its value over the scale.
inline void store_head(const bf16* from, i64 size, byte* to) {
  const float largest = largest_magnitude(from, size);
  alignas(64) bf16 scale[32];
  store(scale, _mm512_set1_ps(scale_for(largest)));
  const float rounded = _mm512_cvtss_f32(load(scale));
  const __m512 inverse = _mm512_set1_ps(rounded > 0.0f ? 1.0f / rounded : 0.0f);
  for (i64 i = 0; i < size; i += kVector) {
    __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(load(from + i), inverse));
    whole = _mm512_max_epi32(_mm512_min_epi32(whole, _mm512_set1_epi32(127)), _mm512_set1_epi32(-127));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtepi32_epi8(_mm512_add_epi32(whole, _mm512_set1_epi32(128))));
  }
  std::memcpy(to + size, scale, kScale);
}

// Sixteen whole numbers of up to kWhole as their upper and lower bytes, both signed: upper * 256 + lower.
inline void store_planes(__m512i whole, int8_t* upper, int8_t* lower) {
  const __m512i rounded = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(upper), _mm512_cvtepi32_epi8(rounded));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(lower), _mm512_cvtepi32_epi8(whole));
}

// A row of whole numbers that is multiplied with bytes of the pool.
struct WholeRow {
  float scale;    // what its numbers are to be multiplied by
  int32_t shift;  // what is too much in a product with bytes, which are 128 more than what they stand for

  // A product of both planes, without the shift, as numbers.
  __m512 product(const int32_t* upper, const int32_t* lower) const {
    const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(_mm512_loadu_si512(upper), 8), _mm512_loadu_si512(lower));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_set1_epi32(shift)));
  }
};

// What is too much in products with a row whose numbers have these sums. It may wrap, of what is no number.
inline int32_t shift_of(__m512i sums) {
  alignas(64) uint32_t each[kVector];
  _mm512_store_si512(each, sums);
  uint32_t sum = 0;
  for (const uint32_t one : each) sum += one;
  return static_cast<int32_t>(128 * sum);
}

// Values in bfloat16, rounded to sixteen bits, as two rows of bytes.
inline WholeRow as_planes(const bf16* from, i64 size, int8_t* upper, int8_t* lower) {
  const float largest = largest_magnitude(from, size);
  const __m512 inverse = _mm512_set1_ps(largest >= kLeast ? kWhole / largest : 0.0f);
  __m512i sum = _mm512_setzero_si512();
  for (i64 i = 0; i < size; i += kVector) {
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(load(from + i), inverse));
    store_planes(whole, upper + i, lower + i);
    sum = _mm512_add_epi32(sum, whole);
  }
  return {largest < kLeast ? 0.0f : largest / kWhole, shift_of(sum)};
}

constexpr i64 kColumns = 64;  // columns of packed bytes

// C[MR, 64] (+)= A[MR, 4 quads] B, where B is packed as [quads][64][4]. Calls `meanwhile` once for each quad.
template <int MR, typename Meanwhile>
inline void multiply_some(const int8_t* a, i64 lda, const byte* b, i64 quads, int32_t* c, i64 ldc, bool add, const Meanwhile& meanwhile) {
  using Lanes = int32_t __attribute__((vector_size(64)));  // not __m512i, which may alias: sums of it do not stay in registers
  Lanes acc[MR][4];
  for (int m = 0; m < MR; ++m)
    for (int j = 0; j < 4; ++j) acc[m][j] = add ? (Lanes)_mm512_loadu_si512(c + m * ldc + j * kVector) : Lanes{};
  for (i64 q = 0; q < quads; ++q) {
    Lanes column[4];
    for (int j = 0; j < 4; ++j) column[j] = (Lanes)_mm512_loadu_si512(b + (q * kColumns + j * kVector) * 4);
    meanwhile();
    for (int m = 0; m < MR; ++m) {
      int quad;
      std::memcpy(&quad, a + m * lda + 4 * q, sizeof quad);
      const __m512i row = _mm512_set1_epi32(quad);
      for (int j = 0; j < 4; ++j) acc[m][j] = (Lanes)_mm512_dpbusd_epi32((__m512i)acc[m][j], (__m512i)column[j], row);
    }
  }
  for (int m = 0; m < MR; ++m)
    for (int j = 0; j < 4; ++j) _mm512_storeu_si512(c + m * ldc + j * kVector, (__m512i)acc[m][j]);
}

// The same for any even number of rows: both planes of each. `meanwhile` is called beside the first few.
template <typename Meanwhile = Nothing>
inline void multiply_whole(const int8_t* a, i64 lda, i64 rows, const byte* b, i64 quads, int32_t* c, i64 ldc, bool add,
                           const Meanwhile& meanwhile = {}) {
  if (rows >= 6) {
    multiply_some<6>(a, lda, b, quads, c, ldc, add, meanwhile);
    return multiply_whole(a + 6 * lda, lda, rows - 6, b, quads, c + 6 * ldc, ldc, add);
  }
  if (rows == 4) multiply_some<4>(a, lda, b, quads, c, ldc, add, meanwhile);
  if (rows == 2) multiply_some<2>(a, lda, b, quads, c, ldc, add, meanwhile);
}

}  // namespace
