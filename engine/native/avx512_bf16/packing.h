// A paged context in the order that products read it in.
#pragma once

#include <context.h>
#include <multiply.h>
#include <transpose.h>

namespace {

constexpr i64 kLine = 32;   // values of a line of the caches, which is a register
constexpr int kBeside = 3;  // lines that are brought near with each pair of a product with packed keys or values
alignas(64) constexpr bf16 kNothing[128] = {};

// Up to 64 tokens' keys of one head, which lie at `offsets`, as [H / 2][64][2]; those from `count` on are zero. Brings a quarter as much
// near meanwhile: the rest is for the products with them.
template <i64 kSize>
inline void pack_keys(const bf16* keys, const i64* offsets, i64 count, bf16* to, Ahead& ahead) {
  for (i64 t = 0; t < kColumns; t += kVector)
    for (i64 p = 0; p < kSize / 2; p += kVector) {
      __m512i pairs[16];
      if (t + kVector <= count)
        for (int i = 0; i < 16; ++i) pairs[i] = _mm512_loadu_si512(keys + offsets[t + i] + 2 * p);
      else
        for (int i = 0; i < 16; ++i) pairs[i] = _mm512_loadu_si512((t + i < count ? keys + offsets[t + i] : kNothing) + 2 * p);
      transpose(pairs);
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + ((p + i) * kColumns + t) * 2, pairs[i]);
      ahead.bring<kVector / 4>();
    }
}

// The values of the first `upto` tokens, an even number of which `count` exist, as [upto / 2][64][2] for each 64 of H, `stride` apart.
// Of each 32 of H, every second four come first, then the others. Returns whether all are numbers, where that is asked for. Brings as
// much near as pack_keys.
template <i64 kSize, bool kAsked>
inline bool pack_values(const bf16* values, const i64* offsets, i64 count, i64 upto, bf16* packed, i64 stride, Ahead& ahead) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  __mmask32 no_numbers = 0;
  for (i64 t = 0; t < upto; t += 2) {
    const bf16* from[2] = {t < count ? values + offsets[t] : kNothing, t + 1 < count ? values + offsets[t + 1] : kNothing};
    for (i64 h = 0; h < kSize; h += kLine) {
      const __m512i one = _mm512_loadu_si512(from[0] + h), other = _mm512_loadu_si512(from[1] + h);
      if constexpr (kAsked) {
        no_numbers |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(one, exponent), exponent);
        no_numbers |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(other, exponent), exponent);
      }
      bf16* to = packed + h / kColumns * stride + (t / 2 * kColumns + h % kColumns) * 2;
      _mm512_storeu_si512(to, _mm512_unpacklo_epi16(one, other));
      _mm512_storeu_si512(to + kLine, _mm512_unpackhi_epi16(one, other));
    }
    ahead.bring<kSize / kColumns>();
  }
  return !no_numbers;
}

}  // namespace
