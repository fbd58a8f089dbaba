// Matrix products with weights of four or eight bits, in bfloat16 or in float32, for any number of rows. Results have the
// inputs' type, or are float32 for the output head.
//
// Quantized: 32 inputs of an output share a float16 scale and minimum, and weight = value * scale + minimum. A group's
// values times inputs are added up one after the other; then total += scale * that, total += minimum * sum of inputs. The
// values of 16 outputs and 32 inputs make a record: 16 scales, 16 minimums, then 32-bit words, one for each output: two
// pairs of inputs in eight bits, four in four bits, the first inputs of the pairs in the lower half (library.py packs them).
// bfloat16 and float32: weights times inputs are added up one after the other.
//
// Up to kUnpacked rows read the weights as they are stored. With more rows, those of 16 outputs become float32 once for all of
// them. Both do the same operations on the same values in the same order, so a row's bits do not tell which it was.

#include "common.h"

#include <algorithm>
#include <type_traits>
#include <vector>

namespace {

constexpr i64 kGroup = 32, kOutputs = 16, kTile = 6, kUnpacked = 12, kColumns = 64;
constexpr i64 kAhead = 4096;  // bytes that are asked for ahead: the processor by itself stops at every page

template <int kBits>
constexpr i64 kRecordBytes = 4 * kOutputs + kOutputs * kGroup * kBits / 8;

// Values of 16 outputs, group after group, as they are stored. `kBits` of 4: 0 to 15; of 8: signed.
template <int kBits>
struct Records {
  const uint8_t* record;

  __m256 value(int input, int half) const {
    constexpr int kPairs = 16 / kBits;  // pairs of inputs in a word
    const int pair = input / 2, place = kBits * (pair % kPairs) + 16 * (input % 2);
    const auto* words = reinterpret_cast<const __m256i*>(record + 4 * kOutputs + 64 * (pair / kPairs)) + half;
    const __m256i word = _mm256_loadu_si256(words);
    if (kBits == 4) return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(word, place), _mm256_set1_epi32(15)));
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(word, 24 - place), 24));
  }
  void next() {
    record += kRecordBytes<kBits>;
    for (i64 line = 0; line < kRecordBytes<kBits>; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(record + kAhead + line), _MM_HINT_T0);
  }
};

// The same, or bfloat16 weights, as float32, and float32 weights as they are stored: [inputs][16].
struct Panel {
  const float* values;

  __m256 value(i64 input, int half) const { return _mm256_loadu_ps(values + input * kOutputs + half * kVector); }
  void next() { values += kGroup * kOutputs; }
};

// bfloat16 weights of 16 outputs, from a matrix that is packed as [O / 64][I / 2][64][2].
struct Dense {
  const bf16* pairs;

  __m256 value(i64 input, int half) const {
    const __m256i pair = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs + input / 2 * 2 * kColumns) + half);
    return _mm256_castsi256_ps(input % 2 ? _mm256_and_si256(pair, _mm256_set1_epi32(0xffff0000)) : _mm256_slli_epi32(pair, 16));
  }
};

using Tile = __m256[kTile][2];  // results of up to kTile rows

// T rows times 16 outputs. `sums` are the rows' sums of each group.
template <int T, int kBits, typename Weights>
void multiply_quantized(const float* x, i64 inputs, const float* sums, Weights weights, const uint8_t* record, Tile& y) {
  const i64 groups = inputs / kGroup;
  __m256 total[T][2];
  for (int t = 0; t < T; ++t) total[t][0] = total[t][1] = _mm256_setzero_ps();
  for (i64 g = 0; g < groups; ++g, weights.next(), record += kRecordBytes<kBits>) {
    __m256 dot[T][2];
    for (int t = 0; t < T; ++t) dot[t][0] = dot[t][1] = _mm256_setzero_ps();
#pragma GCC unroll 32
    for (int i = 0; i < kGroup; ++i) {
      const __m256 low = weights.value(i, 0), high = weights.value(i, 1);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const __m256 input = _mm256_broadcast_ss(x + t * inputs + g * kGroup + i);
        dot[t][0] = _mm256_fmadd_ps(low, input, dot[t][0]);
        dot[t][1] = _mm256_fmadd_ps(high, input, dot[t][1]);
      }
    }
    const auto* halves = reinterpret_cast<const __m128i*>(record);
    for (int h = 0; h < 2; ++h) {
      const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128(halves + h)), minimum = _mm256_cvtph_ps(_mm_loadu_si128(halves + 2 + h));
      for (int t = 0; t < T; ++t) {
        total[t][h] = _mm256_fmadd_ps(scale, dot[t][h], total[t][h]);
        total[t][h] = _mm256_fmadd_ps(minimum, _mm256_broadcast_ss(sums + t * groups + g), total[t][h]);
      }
    }
  }
  for (int t = 0; t < T; ++t)
    for (int h = 0; h < 2; ++h) y[t][h] = total[t][h];
}

// T rows times 16 outputs.
template <int T, typename Weights>
void multiply_dense(const float* x, i64 inputs, Weights weights, Tile& y) {
  __m256 total[T][2];
  for (int t = 0; t < T; ++t) total[t][0] = total[t][1] = _mm256_setzero_ps();
  const auto add = [&](i64 input) {
    const __m256 low = weights.value(input, 0), high = weights.value(input, 1);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const __m256 broadcast = _mm256_broadcast_ss(x + t * inputs + input);
      total[t][0] = _mm256_fmadd_ps(low, broadcast, total[t][0]);
      total[t][1] = _mm256_fmadd_ps(high, broadcast, total[t][1]);
    }
  };
  i64 input = 0;
  for (; input + 16 <= inputs; input += 16)
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) add(input + i);
  for (; input < inputs; ++input) add(input);
  for (int t = 0; t < T; ++t)
    for (int h = 0; h < 2; ++h) y[t][h] = total[t][h];
}

// Call `multiply` with a constant number of rows, up to kTile, and the first of them, until all are done, and store results.
template <typename Out, typename Multiply>
void for_tiles(i64 rows, Out* y, i64 outputs, const Multiply& multiply) {
  const i64 tiles = (rows + kTile - 1) / kTile;
  for (i64 first = 0, count, i = 0; i < tiles; ++i, first += count) {
    count = rows / tiles + (i < rows % tiles);  // about equal, since small tiles use the processor badly
    Tile tile;
    switch (count) {
      case 1: multiply(std::integral_constant<int, 1>(), first, tile); break;
      case 2: multiply(std::integral_constant<int, 2>(), first, tile); break;
      case 3: multiply(std::integral_constant<int, 3>(), first, tile); break;
      case 4: multiply(std::integral_constant<int, 4>(), first, tile); break;
      case 5: multiply(std::integral_constant<int, 5>(), first, tile); break;
      default: multiply(std::integral_constant<int, kTile>(), first, tile); break;
    }
    for (i64 t = 0; t < count; ++t)
      for (int h = 0; h < 2; ++h) store(y + (first + t) * outputs + h * kVector, tile[t][h]);
  }
}

// Rows in float32, and their sums of each group if there are groups.
struct Inputs {
  std::vector<float> values, sums;

  template <typename In>
  void read(const In* x, i64 rows, i64 inputs, bool groups) {
    values.resize(rows * inputs);
    sums.resize(groups ? rows * inputs / kGroup : 0);
    const i64 whole = rows * inputs / kVector * kVector;
    for (i64 i = 0; i < whole; i += kVector) _mm256_storeu_ps(&values[i], load(x + i));
    for (i64 i = whole; i < rows * inputs; ++i) values[i] = widened(x[i]);
    for (i64 i = 0; i < static_cast<i64>(sums.size()); ++i) {
      __m256 lanes = _mm256_setzero_ps();
      for (i64 j = 0; j < kGroup; j += kVector) lanes = _mm256_add_ps(lanes, _mm256_loadu_ps(&values[i * kGroup + j]));
      sums[i] = sum(lanes);
    }
  }
};

template <int kBits, typename Out>
void quantized_block(const Inputs& x, const uint8_t* records, Out* y, i64 rows, i64 inputs, i64 outputs) {
  const i64 groups = inputs / kGroup;
  const auto multiply_by = [&](const auto& weights) {
    for_tiles(rows, y, outputs, [&](auto count, i64 first, Tile& tile) {
      multiply_quantized<count, kBits>(&x.values[first * inputs], inputs, &x.sums[first * groups], weights, records, tile);
    });
  };
  if (rows <= kUnpacked) return multiply_by(Records<kBits>{records});
  static thread_local std::vector<float> panel;
  panel.resize(inputs * kOutputs);
  float* to = panel.data();
  for (Records<kBits> from{records}; to < panel.data() + panel.size(); from.next())
#pragma GCC unroll 32
    for (int i = 0; i < kGroup; ++i)
      for (int h = 0; h < 2; ++h, to += kVector) _mm256_storeu_ps(to, from.value(i, h));
  multiply_by(Panel{panel.data()});
}

// Results of 16 outputs, the first of which is `column`.
template <typename Out>
void dense_block(const Inputs& x, const float* packed, i64 column, Out* y, i64 rows, i64 inputs, i64 outputs) {
  const Panel stored{packed + column * inputs};
  for_tiles(rows, y, outputs, [&](auto count, i64 first, Tile& tile) { multiply_dense<count>(&x.values[first * inputs], inputs, stored, tile); });
}

template <typename Out>
void dense_block(const Inputs& x, const bf16* packed, i64 column, Out* y, i64 rows, i64 inputs, i64 outputs) {
  const Dense stored{packed + column / kColumns * inputs * kColumns + column % kColumns * 2};
  const auto multiply_by = [&](const auto& weights) {
    for_tiles(rows, y, outputs, [&](auto count, i64 first, Tile& tile) { multiply_dense<count>(&x.values[first * inputs], inputs, weights, tile); });
  };
  if (rows <= kUnpacked) return multiply_by(stored);
  static thread_local std::vector<float> panel;
  panel.resize(inputs * kOutputs);
  for (i64 i = 0; i < inputs; ++i)
    for (int h = 0; h < 2; ++h) _mm256_storeu_ps(&panel[i * kOutputs + h * kVector], stored.value(i, h));
  multiply_by(Panel{panel.data()});
}

template <typename In, typename Out>
void quantized(const In* x, const uint8_t* records, Out* y, i64 rows, i64 inputs, i64 outputs, i64 bits, i64 threads) {
  static thread_local Inputs own;
  own.read(x, rows, inputs, true);
  const Inputs& read = own;
  const i64 bytes = inputs / kGroup * (bits == 8 ? kRecordBytes<8> : kRecordBytes<4>);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (i64 block = 0; block < outputs / kOutputs; ++block) {
    const auto run = bits == 8 ? quantized_block<8, Out> : quantized_block<4, Out>;
    run(read, records + block * bytes, y + block * kOutputs, rows, inputs, outputs);
  }
}

template <typename In, typename Out>
void dense(const In* x, const In* packed, Out* y, i64 rows, i64 inputs, i64 outputs, i64 threads) {
  static thread_local Inputs own;
  own.read(x, rows, inputs, false);
  const Inputs& read = own;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (i64 block = 0; block < outputs / kOutputs; ++block) {
    const i64 column = block * kOutputs;
    dense_block(read, packed, column, y + column, rows, inputs, outputs);
  }
}

}  // namespace

extern "C" {

// y = x Wᵀ: [T, I] to [T, O]. I is a multiple of 32, O of 16.
void quantized_linear(const bf16* x, const uint8_t* records, bf16* y, i64 rows, i64 inputs, i64 outputs, i64 bits, i64 threads) {
  quantized(x, records, y, rows, inputs, outputs, bits, threads);
}

void quantized_linear_float32(const float* x, const uint8_t* records, float* y, i64 rows, i64 inputs, i64 outputs, i64 bits, i64 threads) {
  quantized(x, records, y, rows, inputs, outputs, bits, threads);
}

// The same with a result in float32: logits in bfloat16 would be an eighth apart.
void quantized_logits(const bf16* x, const uint8_t* records, float* y, i64 rows, i64 inputs, i64 outputs, i64 bits, i64 threads) {
  quantized(x, records, y, rows, inputs, outputs, bits, threads);
}

// y = x Wᵀ from bfloat16 weights, packed as [O / 64][I / 2][64][2]. I is even, O a multiple of 64.
void dense_linear(const bf16* x, const bf16* packed, bf16* y, i64 rows, i64 inputs, i64 outputs, i64 threads) {
  dense(x, packed, y, rows, inputs, outputs, threads);
}

// y = x Wᵀ from float32 weights, packed as [O / 16][I][16].
void dense_linear_float32(const float* x, const float* packed, float* y, i64 rows, i64 inputs, i64 outputs, i64 threads) {
  dense(x, packed, y, rows, inputs, outputs, threads);
}

// bfloat16 with a result in float32.
void dense_logits(const bf16* x, const bf16* packed, float* y, i64 rows, i64 inputs, i64 outputs, i64 threads) {
  dense(x, packed, y, rows, inputs, outputs, threads);
}

}  // extern "C"
