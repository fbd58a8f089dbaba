// Matrix products by AMX's tiles: with weights of four or eight bits, which become bfloat16 as they are read, and with
// bfloat16 weights. For any number of rows; results are bfloat16, or float32 for the output head.
//
// 32 inputs of an output share a float16 scale and minimum, and weight = value * scale + minimum, rounded to bfloat16. So
// these products are those of the bfloat16 weights, bit for bit. The values of 16 outputs and 32 inputs make a record: 16
// scales, 16 minimums, then 16-bit words of four nibbles. Words go [z][output][input of a pair]; nibble n belongs to pair
// 4 z + n, and in eight bits nibbles 2 n and 2 n + 1 to pair 2 z + n. A record becomes a tile: 16 rows, each a pair of
// inputs of 16 outputs.

#include "common.h"
#include <multiply.h>

#include <vector>

namespace {

constexpr i64 kGroup = 32, kOutputs = 16;
constexpr i64 kAhead = 4096;     // bytes that are asked for ahead: the processor by itself stops at every page
constexpr i64 kRowBlock = 512;  // rows for which weights are unpacked once: as many as stay near the processor

template <bool kEightBits>
constexpr i64 kRecordBytes = 4 * kOutputs + kOutputs * kGroup / (kEightBits ? 1 : 2);

// The values of a nibble.
inline __m512 nibbles() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

// Eight numbers, each twice.
inline __m512 twice(__m512 v, int first) {
  const __m512i places = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  return _mm512_permutexvar_ps(_mm512_add_epi32(places, _mm512_set1_epi32(first)), v);
}

// Eight outputs of a record, in registers of a pair for each.
template <bool kEightBits>
struct Eight {
  const __m256i* words;
  __m512 scale, small_scale, minimum;  // small_scale is 2^-24 times the scale

  Eight(const uint8_t* record, int half) : words(reinterpret_cast<const __m256i*>(record + 4 * kOutputs) + half) {
    const auto* halves = reinterpret_cast<const __m256i*>(record);
    scale = twice(_mm512_cvtph_ps(_mm256_loadu_si256(halves)), 8 * half);
    small_scale = _mm512_mul_ps(scale, _mm512_set1_ps(0x1p-24f));
    minimum = twice(_mm512_cvtph_ps(_mm256_loadu_si256(halves + 1)), 8 * half);
  }
  // Words z of the record, in 32 bits each.
  __m512i wide(int z) const { return _mm512_cvtepi16_epi32(_mm256_loadu_si256(words + 2 * z)); }
  // The weights of pair n of such words.
  __m512 weights(__m512i wide, int n, __m512 table) const {
    if constexpr (!kEightBits) return _mm512_fmadd_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4 * n), table), scale, minimum);
    // The upper byte is a number with its sign; the lower one becomes 2^24 times its number.
    if (n) return _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_srai_epi32(wide, 8)), scale, minimum);
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_slli_epi32(wide, 24)), small_scale, minimum);
  }
};

// The records of 16 outputs to columns of a panel, whose pairs are `ldp` values apart.
template <bool kEightBits>
void unpack(const uint8_t* records, i64 inputs, bf16* panel, i64 ldp) {
  constexpr int kPairs = kEightBits ? 2 : 4;  // pairs of a word
  const __m512 table = nibbles();
  for (i64 g = 0; g < inputs / kGroup; ++g, records += kRecordBytes<kEightBits>, panel += kTile * ldp) {
    for (i64 line = 0; line < kRecordBytes<kEightBits>; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(records + kAhead + line), _MM_HINT_T0);
    const Eight<kEightBits> lower(records, 0), upper(records, 1);
#pragma GCC unroll 8
    for (int z = 0; z < 16 / kPairs; ++z) {
      const __m512i low = lower.wide(z), high = upper.wide(z);
#pragma GCC unroll 4
      for (int n = 0; n < kPairs; ++n) {
        const __m512bh pairs = _mm512_cvtne2ps_pbh(upper.weights(high, n, table), lower.weights(low, n, table));
        _mm512_storeu_si512(panel + (kPairs * z + n) * ldp, (__m512i)pairs);
      }
    }
  }
}

inline void put(bf16* p, __m512 v) { store(p, v); }
inline void put(float* p, __m512 v) { _mm512_storeu_ps(p, v); }

// Rows times 16 * N columns that start at y.
template <int N, typename Out>
void multiply_columns(Multiplier& multiplier, const bf16* x, i64 rows, i64 inputs, const bf16* weights, i64 ldw, Out* y, i64 outputs) {
  alignas(64) float results[2 * kTile][N * kTile];
  for (i64 first = 0; first < rows; first += 2 * kTile) {
    const i64 count = std::min(rows - first, 2 * kTile);
    multiplier.columns<N>(x + first * inputs, inputs, count, weights, ldw, inputs / 2, results[0], N * kTile, false);
    for (i64 r = 0; r < count; ++r)
      for (int n = 0; n < N; ++n) put(y + (first + r) * outputs + n * kTile, _mm512_load_ps(results[r] + n * kTile));
  }
}

template <bool kEightBits, typename Out>
void quantized(const bf16* x, const uint8_t* records, Out* y, i64 rows, i64 inputs, i64 outputs, i64 threads) {
  constexpr i64 kLdp = 4 * kTile;  // a panel is [inputs / 2][32][2]
  const i64 bytes = inputs / kGroup * kRecordBytes<kEightBits>, blocks = (outputs + 2 * kOutputs - 1) / (2 * kOutputs);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    static thread_local std::vector<bf16> panel;
    panel.resize(inputs / 2 * kLdp);
    Multiplier multiplier;
    for (i64 first = 0; first < rows; first += kRowBlock) {
      const i64 count = std::min(rows - first, kRowBlock);
      const bf16* own = x + first * inputs;
#pragma omp for schedule(static) nowait
      for (i64 block = 0; block < blocks; ++block) {
        const i64 column = 2 * block * kOutputs;
        const uint8_t* stored = records + 2 * block * bytes;
        Out* to = y + first * outputs + column;
        unpack<kEightBits>(stored, inputs, panel.data(), kLdp);
        if (column + kOutputs < outputs) {
          unpack<kEightBits>(stored + bytes, inputs, panel.data() + 2 * kTile, kLdp);
          multiply_columns<2>(multiplier, own, count, inputs, panel.data(), kLdp, to, outputs);
        } else {
          multiply_columns<1>(multiplier, own, count, inputs, panel.data(), kLdp, to, outputs);
        }
      }
    }
  }
}

template <typename Out>
void dense(const bf16* x, const bf16* packed, Out* y, i64 rows, i64 inputs, i64 outputs, i64 threads) {
  constexpr i64 kWidth = 2 * kTile;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Multiplier multiplier;
    for (i64 first = 0; first < rows; first += kRowBlock)
#pragma omp for schedule(static) nowait
      for (i64 block = 0; block < outputs / kWidth; ++block) {
        const i64 column = block * kWidth;
        const bf16* weights = packed + column / kColumns * inputs * kColumns + column % kColumns * 2;
        multiply_columns<2>(multiplier, x + first * inputs, std::min(rows - first, kRowBlock), inputs, weights, 2 * kColumns,
                            y + first * outputs + column, outputs);
      }
  }
}

}  // namespace

extern "C" {

// y = x Wᵀ: [T, I] to [T, O]. I is a multiple of 32, O of 16.
void quantized_linear(const bf16* x, const uint8_t* records, bf16* y, i64 rows, i64 inputs, i64 outputs, i64 bits, i64 threads) {
  (bits == 8 ? quantized<true, bf16> : quantized<false, bf16>)(x, records, y, rows, inputs, outputs, threads);
}

// The same with a result in float32: logits in bfloat16 would be an eighth apart.
void quantized_logits(const bf16* x, const uint8_t* records, float* y, i64 rows, i64 inputs, i64 outputs, i64 bits, i64 threads) {
  (bits == 8 ? quantized<true, float> : quantized<false, float>)(x, records, y, rows, inputs, outputs, threads);
}

// y = x Wᵀ from bfloat16 weights, packed as [O / 64][I / 2][64][2]. I is a multiple of 32, O of 64.
void dense_linear(const bf16* x, const bf16* packed, bf16* y, i64 rows, i64 inputs, i64 outputs, i64 threads) {
  dense(x, packed, y, rows, inputs, outputs, threads);
}

// bfloat16 with a result in float32.
void dense_logits(const bf16* x, const bf16* packed, float* y, i64 rows, i64 inputs, i64 outputs, i64 threads) {
  dense(x, packed, y, rows, inputs, outputs, threads);
}

}  // extern "C"
