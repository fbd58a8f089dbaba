// Matrix products with weights of four or eight bits, and with bfloat16 weights, for any number of rows. Results are
// bfloat16, or float32 for the output head.
//
// Quantized: 32 inputs of an output share a float16 scale and minimum, and weight = value * scale + minimum. Values are
// exact in bfloat16. Those of even pairs of inputs times inputs are added up one after the other, and those of odd pairs;
// then total += scale * (even + odd), total += minimum * sum of inputs. The values of 16 outputs and 32 inputs make a
// record: 16 scales, 16 minimums, then 16-bit words of four nibbles. Words go [z][output][input of a pair]; nibble n
// belongs to pair 4 z + n, and in eight bits nibbles 2 n and 2 n + 1 to pair 2 z + n.
//
// Up to kRows rows read the values as they are stored. With more rows, those of 16 outputs become bfloat16 once for all of
// them. Both do the same operations on the same values in the same order, so a row's bits do not tell which it was.

#include "common.h"
#include <multiply.h>

#include <algorithm>
#include <vector>

namespace {

constexpr i64 kGroup = 32, kOutputs = 16, kRows = 8;
constexpr i64 kAhead = 4096;  // bytes that are asked for ahead: the processor by itself stops at every page

template <bool kEightBits>
constexpr i64 kRecordBytes = 4 * kOutputs + kOutputs * kGroup / (kEightBits ? 1 : 2);

// A nibble's value in bfloat16. A look-up reads five bits, so the table holds every value twice.
__m512i nibbles() {
  alignas(64) bf16 entries[32];
  for (int i = 0; i < 32; ++i) {
    const float value = static_cast<float>(i & 15);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    entries[i] = static_cast<bf16>(bits >> 16);
  }
  return _mm512_load_si512(entries);
}

// Values of 16 outputs, group after group, as they are stored.
template <bool kEightBits>
struct Records {
  const uint8_t* record;
  __m512i table;

  // Call `use` with each pair of a group and its values.
  template <typename Use>
  void pairs(const Use& use) const {
    constexpr int kPairs = kEightBits ? 2 : 4;  // pairs of a word
    for (int z = 0; z < 16 / kPairs; ++z) {
      __m512i words = _mm512_loadu_si512(record + 4 * kOutputs + 64 * z);
      for (int n = 0; n < kPairs; ++n) {
        use(kPairs * z + n, values(words));
        words = _mm512_srli_epi16(words, kEightBits ? 8 : 4);
      }
    }
  }
  void next() {
    record += kRecordBytes<kEightBits>;
    for (i64 line = 0; line < kRecordBytes<kEightBits>; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(record + kAhead + line), _MM_HINT_T0);
  }

 private:
  // Of the lowest bits of each word. Eight bits have so few digits that the upper half of their float32 is exact.
  __m512i values(__m512i words) const {
    if constexpr (!kEightBits) return _mm512_permutexvar_epi16(words, table);
    const __m512 even = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 24), 24));
    const __m512 odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 8), 24));
    return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd));
  }
};

// The same values in bfloat16: [inputs / 2][16][2].
struct Panel {
  const bf16* values;

  template <typename Use>
  void pairs(const Use& use) const {
    for (int pair = 0; pair < 16; ++pair) use(pair, _mm512_loadu_si512(values + pair * 2 * kOutputs));
  }
  void next() { values += kGroup * kOutputs; }
};

inline void put(bf16* p, __m512 v) { store(p, v); }
inline void put(float* p, __m512 v) { _mm512_storeu_ps(p, v); }

// T rows times 16 outputs. `sums` are the rows' sums of each group, for the minimums.
template <int T, bool kEightBits, typename Weights, typename Out>
void multiply(const bf16* x, i64 inputs, const float* sums, Weights weights, const uint8_t* record, Out* y, i64 outputs) {
  const i64 groups = inputs / kGroup;
  __m512 total[T];
  for (int t = 0; t < T; ++t) total[t] = _mm512_setzero_ps();
  for (i64 g = 0; g < groups; ++g, weights.next(), record += kRecordBytes<kEightBits>) {
    __m512 dot[T][2];
    for (int t = 0; t < T; ++t) dot[t][0] = dot[t][1] = _mm512_setzero_ps();
    weights.pairs([&](int pair, __m512i values) __attribute__((always_inline)) {
      for (int t = 0; t < T; ++t)
        dot[t][pair % 2] = _mm512_dpbf16_ps(dot[t][pair % 2], (__m512bh)values, repeat_pair(x + t * inputs + g * kGroup + 2 * pair));
    });
    const auto* halves = reinterpret_cast<const __m256i*>(record);
    const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(halves)), minimum = _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1));
    for (int t = 0; t < T; ++t) {
      total[t] = _mm512_fmadd_ps(scale, _mm512_add_ps(dot[t][0], dot[t][1]), total[t]);
      total[t] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(sums[t * groups + g]), total[t]);
    }
  }
  for (int t = 0; t < T; ++t) put(y + t * outputs, total[t]);
}

template <bool kEightBits, typename Weights, typename Out>
void multiply_rows(const bf16* x, i64 rows, i64 inputs, const float* sums, const Weights& weights, const uint8_t* record, Out* y, i64 outputs) {
  for (; rows > 0; rows -= kRows, x += kRows * inputs, y += kRows * outputs, sums += kRows * (inputs / kGroup)) {
    switch (std::min(rows, kRows)) {
      case 1: multiply<1, kEightBits>(x, inputs, sums, weights, record, y, outputs); break;
      case 2: multiply<2, kEightBits>(x, inputs, sums, weights, record, y, outputs); break;
      case 3: multiply<3, kEightBits>(x, inputs, sums, weights, record, y, outputs); break;
      case 4: multiply<4, kEightBits>(x, inputs, sums, weights, record, y, outputs); break;
      case 5: multiply<5, kEightBits>(x, inputs, sums, weights, record, y, outputs); break;
      case 6: multiply<6, kEightBits>(x, inputs, sums, weights, record, y, outputs); break;
      case 7: multiply<7, kEightBits>(x, inputs, sums, weights, record, y, outputs); break;
      default: multiply<8, kEightBits>(x, inputs, sums, weights, record, y, outputs); break;
    }
  }
}

template <bool kEightBits, typename Out>
void multiply_block(const bf16* x, i64 rows, i64 inputs, const float* sums, const uint8_t* records, Out* y, i64 outputs) {
  static const __m512i table = nibbles();
  if (rows <= kRows) return multiply_rows<kEightBits>(x, rows, inputs, sums, Records<kEightBits>{records, table}, records, y, outputs);
  static thread_local std::vector<bf16> panel;
  panel.resize(inputs * kOutputs);
  Records<kEightBits> from{records, table};
  for (bf16* to = panel.data(); to < panel.data() + panel.size(); to += kGroup * kOutputs, from.next())
    from.pairs([&](int pair, __m512i values) { _mm512_storeu_si512(to + pair * 2 * kOutputs, values); });
  multiply_rows<kEightBits>(x, rows, inputs, sums, Panel{panel.data()}, records, y, outputs);
}

template <typename Out>
void multiply_all(const bf16* x, const uint8_t* records, Out* y, i64 rows, i64 inputs, i64 outputs, i64 bits, i64 threads) {
  const i64 groups = inputs / kGroup, bytes = groups * (bits == 8 ? kRecordBytes<true> : kRecordBytes<false>);
  static thread_local std::vector<float> buffer;
  buffer.resize(rows * groups);
  for (i64 i = 0; i < rows * groups; ++i)
    buffer[i] = _mm512_reduce_add_ps(_mm512_add_ps(load(x + i * kGroup), load(x + i * kGroup + kVector)));
  const float* sums = buffer.data();
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (i64 block = 0; block < outputs / kOutputs; ++block)
    (bits == 8 ? multiply_block<true, Out> : multiply_block<false, Out>)(x, rows, inputs, sums, records + block * bytes, y + block * kOutputs, outputs);
}

// Rows times 64 outputs.
template <typename Out>
void dense_block(const bf16* x, i64 rows, i64 inputs, const bf16* packed, Out* y, i64 outputs) {
  constexpr i64 kAtOnce = 48;
  alignas(64) float results[kAtOnce * kColumns];
  for (i64 first = 0; first < rows; first += kAtOnce) {
    const i64 count = std::min(rows - first, kAtOnce);
    Multiplier()(x + first * inputs, inputs, count, packed, inputs / 2, results, kColumns, false);
    for (i64 r = 0; r < count; ++r)
      for (i64 i = 0; i < kColumns; i += kVector) put(y + (first + r) * outputs + i, _mm512_load_ps(results + r * kColumns + i));
  }
}

template <typename Out>
void dense(const bf16* x, const bf16* packed, Out* y, i64 rows, i64 inputs, i64 outputs, i64 threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (i64 block = 0; block < outputs / kColumns; ++block)
    dense_block(x, rows, inputs, packed + block * inputs * kColumns, y + block * kColumns, outputs);
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

// y = x Wᵀ from bfloat16 weights, packed as [O / 64][I / 2][64][2]. I is even, O a multiple of 64.
void dense_linear(const bf16* x, const bf16* packed, bf16* y, i64 rows, i64 inputs, i64 outputs, i64 threads) {
  dense(x, packed, y, rows, inputs, outputs, threads);
}

// bfloat16 with a result in float32.
void dense_logits(const bf16* x, const bf16* packed, float* y, i64 rows, i64 inputs, i64 outputs, i64 threads) {
  dense(x, packed, y, rows, inputs, outputs, threads);
}

}  // extern "C"
