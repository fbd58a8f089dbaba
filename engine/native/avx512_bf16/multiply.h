// Products with a packed matrix, by AVX-512's bfloat16 products: each pair of inputs is added to a sum after the one before it.
#pragma once

#include "common.h"

constexpr i64 kColumns = 64;  // columns of a packed matrix

// C[rows, 64] (+)= A[rows, 2 pairs] B, where B is packed as [pairs][64][2]. Calls `meanwhile` once for each pair.
class Multiplier {
 public:
  template <typename Meanwhile = Nothing>
  void operator()(const bf16* a, i64 lda, i64 rows, const bf16* b, i64 pairs, float* c, i64 ldc, bool add,
                  const Meanwhile& meanwhile = {}) const {
    switch (rows) {
      default:
        multiply<6>(a, lda, b, pairs, c, ldc, add, meanwhile);
        return (*this)(a + 6 * lda, lda, rows - 6, b, pairs, c + 6 * ldc, ldc, add);
      case 6: multiply<6>(a, lda, b, pairs, c, ldc, add, meanwhile); break;
      case 5: multiply<5>(a, lda, b, pairs, c, ldc, add, meanwhile); break;
      case 4: multiply<4>(a, lda, b, pairs, c, ldc, add, meanwhile); break;
      case 3: multiply<3>(a, lda, b, pairs, c, ldc, add, meanwhile); break;
      case 2: multiply<2>(a, lda, b, pairs, c, ldc, add, meanwhile); break;
      case 1: multiply<1>(a, lda, b, pairs, c, ldc, add, meanwhile); break;
      case 0: break;
    }
  }

 private:
  template <int MR, typename Meanwhile>
  static void multiply(const bf16* a, i64 lda, const bf16* b, i64 pairs, float* c, i64 ldc, bool add, const Meanwhile& meanwhile) {
    __m512 acc[MR][4];
    for (int m = 0; m < MR; ++m)
      for (int j = 0; j < 4; ++j) acc[m][j] = add ? _mm512_loadu_ps(c + m * ldc + j * kVector) : _mm512_setzero_ps();
    for (i64 p = 0; p < pairs; ++p) {
      __m512bh column[4];
      for (int j = 0; j < 4; ++j) column[j] = load_pairs(b + p * 2 * kColumns + j * 32);
      meanwhile();
      for (int m = 0; m < MR; ++m) {
        const __m512bh row = repeat_pair(a + m * lda + 2 * p);
        for (int j = 0; j < 4; ++j) acc[m][j] = _mm512_dpbf16_ps(acc[m][j], row, column[j]);
      }
    }
    for (int m = 0; m < MR; ++m)
      for (int j = 0; j < 4; ++j) _mm512_storeu_ps(c + m * ldc + j * kVector, acc[m][j]);
  }
};
