// Words of 32 bits in sixteen registers of AVX-512: a float32 each, or two bfloat16 values.
#pragma once

#include <immintrin.h>

// Rows of words become columns.
inline void transpose(__m512i v[16]) {
  __m512i lanes[16];  // [4 q + j]: in each quarter, word j of it of the rows 4 q to 4 q + 3
  for (int i = 0; i < 16; i += 4) {
    const __m512i a = _mm512_unpacklo_epi32(v[i], v[i + 1]), b = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    const __m512i c = _mm512_unpacklo_epi32(v[i + 2], v[i + 3]), d = _mm512_unpackhi_epi32(v[i + 2], v[i + 3]);
    lanes[i] = _mm512_unpacklo_epi64(a, c);
    lanes[i + 1] = _mm512_unpackhi_epi64(a, c);
    lanes[i + 2] = _mm512_unpacklo_epi64(b, d);
    lanes[i + 3] = _mm512_unpackhi_epi64(b, d);
  }
  for (int j = 0; j < 4; ++j) {
    const __m512i a = _mm512_shuffle_i32x4(lanes[j], lanes[4 + j], 0x88), b = _mm512_shuffle_i32x4(lanes[j], lanes[4 + j], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(lanes[8 + j], lanes[12 + j], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(lanes[8 + j], lanes[12 + j], 0xdd);
    v[j] = _mm512_shuffle_i32x4(a, c, 0x88);
    v[4 + j] = _mm512_shuffle_i32x4(b, d, 0x88);
    v[8 + j] = _mm512_shuffle_i32x4(a, c, 0xdd);
    v[12 + j] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
}
