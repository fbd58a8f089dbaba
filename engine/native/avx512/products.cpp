// Matrix products with weights of four or eight bits, for few rows: reading the weights is what such a product costs.
// And those of the output head, whose results are float32.
//
// 32 inputs of an output share a float16 scale and minimum: weight = value * scale + minimum. The values of 16 outputs
// and 32 inputs make a record: 16 scales, 16 minimums, then 16-bit words of four nibbles. A nibble becomes bfloat16 by
// a table look-up that reads five bits of its word, so the table holds every value twice. Words go
// [z][output][input of a pair]; nibble n belongs to pair 4 z + n, or in eight bits to pair 2 z + n / 2, low half first.
// What a table gives is exact, so nothing is rounded before the float32 sums.

#include "common.h"

#include <algorithm>
#include <vector>

namespace {

constexpr i64 kGroup = 32, kOutputs = 16, kRows = 8;
constexpr i64 kAhead = 4096;  // bytes that are asked for ahead: the processor by itself stops at every page

template <bool kEightBits>
constexpr i64 kRecordBytes = 4 * kOutputs + kOutputs * kGroup / (kEightBits ? 1 : 2);

// Nibble to bfloat16: its value, or 16 times its value as a signed number.
__m512i table(bool high) {
  alignas(64) bf16 entries[32];
  for (int i = 0; i < 32; ++i) {
    const int nibble = i & 15;
    const float value = high ? 16.0f * ((nibble ^ 8) - 8) : static_cast<float>(nibble);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    entries[i] = static_cast<bf16>(bits >> 16);
  }
  return _mm512_load_si512(entries);
}

inline void put(bf16* p, __m512 v) { store(p, v); }
inline void put(float* p, __m512 v) { _mm512_storeu_ps(p, v); }

// T rows times 16 outputs. `sums` are the rows' sums of each group, for the minimums.
template <int T, bool kEightBits, typename Out>
void multiply(const bf16* x, i64 inputs, const float* sums, const uint8_t* records, Out* y, i64 outputs, __m512i low, __m512i high) {
  const i64 groups = inputs / kGroup;
  __m512 total[T];
  for (int t = 0; t < T; ++t) total[t] = _mm512_setzero_ps();
  for (i64 g = 0; g < groups; ++g, records += kRecordBytes<kEightBits>) {
    for (i64 line = 0; line < kRecordBytes<kEightBits>; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(records + kAhead + line), _MM_HINT_T0);
    const auto* halves = reinterpret_cast<const __m256i*>(records);
    const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(halves)), minimum = _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1));
    __m512 dot[T][2];
    for (int t = 0; t < T; ++t) dot[t][0] = dot[t][1] = _mm512_setzero_ps();
    for (int z = 0; z < (kEightBits ? 8 : 4); ++z) {
      __m512i words = _mm512_loadu_si512(records + 4 * kOutputs + 64 * z);
      for (int n = 0; n < 4; ++n) {
        const __m512bh values = (__m512bh)_mm512_permutexvar_epi16(words, kEightBits && n % 2 ? high : low);
        const int pair = kEightBits ? 2 * z + n / 2 : 4 * z + n;
        for (int t = 0; t < T; ++t)
          dot[t][n % 2] = _mm512_dpbf16_ps(dot[t][n % 2], values, repeat_pair(x + t * inputs + g * kGroup + 2 * pair));
        words = _mm512_srli_epi16(words, 4);
      }
    }
    for (int t = 0; t < T; ++t) {
      total[t] = _mm512_fmadd_ps(scale, _mm512_add_ps(dot[t][0], dot[t][1]), total[t]);
      total[t] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(sums[t * groups + g]), total[t]);
    }
  }
  for (int t = 0; t < T; ++t) put(y + t * outputs, total[t]);
}

template <bool kEightBits, typename Out>
void multiply_rows(const bf16* x, i64 rows, i64 inputs, const float* sums, const uint8_t* records, Out* y, i64 outputs) {
  static const __m512i low = table(false), high = table(true);
  for (; rows > 0; rows -= kRows, x += kRows * inputs, y += kRows * outputs, sums += kRows * (inputs / kGroup)) {
    switch (std::min(rows, kRows)) {
      case 1: multiply<1, kEightBits>(x, inputs, sums, records, y, outputs, low, high); break;
      case 2: multiply<2, kEightBits>(x, inputs, sums, records, y, outputs, low, high); break;
      case 3: multiply<3, kEightBits>(x, inputs, sums, records, y, outputs, low, high); break;
      case 4: multiply<4, kEightBits>(x, inputs, sums, records, y, outputs, low, high); break;
      case 5: multiply<5, kEightBits>(x, inputs, sums, records, y, outputs, low, high); break;
      case 6: multiply<6, kEightBits>(x, inputs, sums, records, y, outputs, low, high); break;
      case 7: multiply<7, kEightBits>(x, inputs, sums, records, y, outputs, low, high); break;
      default: multiply<8, kEightBits>(x, inputs, sums, records, y, outputs, low, high); break;
    }
  }
}

template <typename Out>
void multiply_all(const bf16* x, const uint8_t* records, Out* y, i64 rows, i64 inputs, i64 outputs, i64 bits, i64 threads) {
  const i64 groups = inputs / kGroup;
  static thread_local std::vector<float> buffer;
  buffer.resize(rows * groups);
  for (i64 i = 0; i < rows * groups; ++i)
    buffer[i] = _mm512_reduce_add_ps(_mm512_add_ps(load(x + i * kGroup), load(x + i * kGroup + kVector)));
  const float* sums = buffer.data();
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (i64 block = 0; block < outputs / kOutputs; ++block) {
    if (bits == 8)
      multiply_rows<true>(x, rows, inputs, sums, records + block * groups * kRecordBytes<true>, y + block * kOutputs, outputs);
    else
      multiply_rows<false>(x, rows, inputs, sums, records + block * groups * kRecordBytes<false>, y + block * kOutputs, outputs);
  }
}

}  // namespace

extern "C" {

// y = x Wᵀ: [T, I] to [T, O]. I is a multiple of 32, O of 16.
void quantized_linear(const bf16* x, const uint8_t* records, bf16* y, i64 rows, i64 inputs, i64 outputs, i64 bits, i64 threads) {
  multiply_all(x, records, y, rows, inputs, outputs, bits, threads);
}

// The same with a result in float32: logits in bfloat16 would be an eighth apart.
void quantized_logits(const bf16* x, const uint8_t* records, float* y, i64 rows, i64 inputs, i64 outputs, i64 bits, i64 threads) {
  multiply_all(x, records, y, rows, inputs, outputs, bits, threads);
}

// Logits from a bfloat16 head, packed as [O / 64][I / 2][64][2]. I is even, O a multiple of 64.
void dense_logits(const bf16* x, const bf16* packed, float* y, i64 rows, i64 inputs, i64 outputs, i64 threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (i64 block = 0; block < outputs / kColumns; ++block)
    multiply_dense(x, inputs, rows, packed + block * inputs * kColumns, inputs / 2, y + block * kColumns, outputs, false);
}

}  // extern "C"
