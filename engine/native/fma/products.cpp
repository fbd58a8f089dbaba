// Matrix products with weights of four or eight bits, in bfloat16 or in float32, for any number of rows. Results have the
// inputs' type, or are float32 for the output head.
//
// Quantized: 32 inputs of an output share a float16 scale and minimum, and weight = value * scale + minimum. A group's
// values times inputs are added up one after the other; then total += scale * that, total += minimum * sum of inputs. The
// values of 16 outputs and 32 inputs make a record: 16 scales, 16 minimums, then 32-bit words, one for each output: two
// pairs of inputs in eight bits, four in four bits, the first inputs of the pairs in the lower half (library.py packs them).
// bfloat16 and float32: weights times inputs are added up one after the other.
//
// Rows go in parts that stay in a core's cache while all weights pass by, and each part in tiles that share a weight once it is
// loaded. A part of up to kAsStored rows reads the weights as they are stored. With more rows, those of 16 outputs become float32
// once for all of them, panel after panel. All do the same operations on the same values in the same order, so a row's bits do
// not tell which it was.

#include "rows.h"

#include <unistd.h>

#include <algorithm>
#include <type_traits>

namespace {

constexpr i64 kAsStored = 2 * kTile, kColumns = 64;
constexpr int kParts = kOutputs / kVector;  // registers for 16 outputs
constexpr int kFew = kTile / (3 * kParts);  // rows for which 64 outputs' sums fit into registers
constexpr i64 kPanelGroups = 12;            // of a panel: 24 KiB, which stay in the nearest cache
// What is asked for ahead, in bytes of records and in groups of bfloat16: the processor by itself stops at every page.
constexpr i64 kAhead = 4096, kGroupsAhead = 2;

template <int kBits>
constexpr i64 kRecordBytes = 4 * kOutputs + kOutputs * kGroup * kBits / 8;

// Values of 16 outputs, group after group, as they are stored. `kBits` of 4: 0 to 15; of 8: signed.
template <int kBits>
struct Records {
  const uint8_t* record;

  Vector value(int input, int part) const {
    constexpr int kPairs = 16 / kBits;  // pairs of inputs in a word
    const int pair = input / 2, place = kBits * (pair % kPairs) + 16 * (input % 2);
    const Words words = load_words(record + 4 * kOutputs + 64 * (pair / kPairs) + 4 * kVector * part);
    return kBits == 4 ? nibbles(words, place) : bytes(words, place);
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

  Vector value(int input, int part) const { return load(values + input * kOutputs + part * kVector); }
  void next() { values += kGroup * kOutputs; }
};

// bfloat16 weights of 16 outputs, from a matrix that is packed as [O / 64][I / 2][64][2].
struct Dense {
  const bf16* pairs;

  Vector value(int input, int part) const {
    return halves(load_words(pairs + input / 2 * 2 * kColumns + 2 * kVector * part), input % 2);
  }
  void next() {
    pairs += kGroup * kColumns;
    for (i64 pair = 0; pair < kGroup / 2; ++pair)
      _mm_prefetch(reinterpret_cast<const char*>(pairs + kGroupsAhead * kGroup * kColumns + pair * 2 * kColumns), _MM_HINT_T0);
  }
};

// What 32 inputs of T rows, [32][T], add to sums, for each of G weights. `stride`: inputs between those of one and of the next.
template <int T, int G, typename Weights>
inline void multiply_groups(const float* x, i64 stride, const Weights (&weights)[G], Vector (&sums)[G][T][kParts]) {
#pragma GCC unroll 32
  for (int i = 0; i < kGroup; ++i)
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      Vector value[kParts];
      for (int part = 0; part < kParts; ++part) value[part] = weights[g].value(i, part);
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) {
        const Vector input = all(x[(g * stride + i) * T + t]);
        for (int part = 0; part < kParts; ++part) sums[g][t][part] = multiply_add(value[part], input, sums[g][t][part]);
      }
    }
}

// Call `use` with sums of T rows and 16 outputs that go on from y, [T][16].
template <int T, typename Use>
inline void go_on(float* y, const Use& use) {
  Vector total[T][kParts];
  for (int t = 0; t < T; ++t)
    for (int part = 0; part < kParts; ++part) total[t][part] = load(y + t * kOutputs + part * kVector);
  use(total);
  for (int t = 0; t < T; ++t)
    for (int part = 0; part < kParts; ++part) store(y + t * kOutputs + part * kVector, total[t][part]);
}

// What G groups add to `total`, group after group. Their own sums are taken together: one alone would wait for each product.
template <int T, int kBits, int G, typename Weights>
inline void add_groups(const float* x, const float* sums, Weights& weights, const uint8_t*& record, Vector (&total)[T][kParts]) {
  Weights each[G];
  for (int g = 0; g < G; ++g, weights.next()) each[g] = weights;
  Vector dot[G][T][kParts] = {};
  multiply_groups<T, G>(x, kGroup, each, dot);
  for (int g = 0; g < G; ++g, record += kRecordBytes<kBits>)
    for (int part = 0; part < kParts; ++part) {
      const Vector scale = from_float16(record + 2 * kVector * part), minimum = from_float16(record + 2 * (kOutputs + kVector * part));
      for (int t = 0; t < T; ++t) {
        total[t][part] = multiply_add(scale, dot[g][t][part], total[t][part]);
        total[t][part] = multiply_add(minimum, all(sums[g * T + t]), total[t][part]);
      }
    }
}

// y += T rows times 16 outputs. `sums` are the rows' sums of each group, [groups][T].
template <int T, int kBits, typename Weights>
void multiply_quantized(const float* x, i64 groups, const float* sums, Weights weights, const uint8_t* record, float* y) {
  constexpr int kTogether = std::clamp(kTile / (T * kParts), 1, kBits == 4 ? kFourBitGroups : kEightBitGroups);
  go_on<T>(y, [&](Vector (&total)[T][kParts]) __attribute__((always_inline)) {
    i64 g = 0;
    for (; g + kTogether <= groups; g += kTogether)
      add_groups<T, kBits, kTogether>(x + g * kGroup * T, sums + g * T, weights, record, total);
    for (; g < groups; ++g) add_groups<T, kBits, 1>(x + g * kGroup * T, sums + g * T, weights, record, total);
  });
}

// y += T rows times 16 outputs.
template <int T, typename Weights>
void multiply_dense(const float* x, i64 groups, Weights weights, float* y) {
  go_on<T>(y, [&](Vector (&total)[T][kParts]) __attribute__((always_inline)) {
    for (i64 g = 0; g < groups; ++g, weights.next()) {
      const Weights each[1] = {weights};
      multiply_groups<T, 1>(x + g * kGroup * T, 0, each, reinterpret_cast<Vector (&)[1][T][kParts]>(total));
    }
  });
}

// Call `multiply` with what gives 16 outputs' weights of some groups, the first of these, and how many they are, until all are
// done: all at once as they are stored, or panel after panel.
template <typename Weights, typename Multiply>
void for_weights(i64 rows, i64 groups, Weights weights, const Multiply& multiply) {
  if (rows <= kAsStored) return multiply(weights, 0, groups);
  static thread_local Lines<float> panel(kPanelGroups * kGroup * kOutputs);
  const i64 panels = (groups + kPanelGroups - 1) / kPanelGroups;
  for (i64 i = 0, first = 0, count; i < panels; ++i, first += count) {
    count = groups / panels + (i < groups % panels);
    for (float *to = panel.data(), *end = to + count * kGroup * kOutputs; to < end; weights.next())
#pragma GCC unroll 32
      for (int input = 0; input < kGroup; ++input)
        for (int part = 0; part < kParts; ++part, to += kVector) store(to, weights.value(input, part));
    multiply(Panel{panel.data()}, first, count);
  }
}

// y = rows times 16 outputs.
template <int kBits, typename Out>
void quantized_block(const Inputs& x, const uint8_t* records, Out* y, i64 outputs) {
  Results results(x.rows());
  for_weights(x.rows(), x.groups(), Records<kBits>{records}, [&](const auto& weights, i64 first, i64 count) {
    x.for_tiles(first, results.values, [&](auto rows, const float* values, const float* sums, float* to) {
      multiply_quantized<rows, kBits>(values, count, sums, weights, records + first * kRecordBytes<kBits>, to);
    });
  });
  results.write(x.rows(), y, outputs);
}

template <typename Weights, typename Out>
void dense_block(const Inputs& x, const Weights& stored, Out* y, i64 outputs) {
  Results results(x.rows());
  for_weights(x.rows(), x.groups(), stored, [&](const auto& weights, i64 first, i64 count) {
    x.for_tiles(first, results.values, [&](auto rows, const float* values, const float*, float* to) { multiply_dense<rows>(values, count, weights, to); });
  });
  results.write(x.rows(), y, outputs);
}

// What gives the weights of 16 outputs, the first of which is `column`.
inline Panel stored_weights(const float* packed, i64 column, i64 inputs) { return {packed + column * inputs}; }
inline Dense stored_weights(const bf16* packed, i64 column, i64 inputs) {
  return {packed + column / kColumns * inputs * kColumns + column % kColumns * 2};
}

// y = up to kFew rows times 64 outputs, all at once: the sums of 16 alone would wait for each product.
template <typename In, typename Out>
void dense_few(const Inputs& x, const In* packed, i64 column, Out* y, i64 outputs) {
  with_constant<kFew>(x.rows(), [&](auto rows) {
    constexpr int T = rows, kBlocks = kColumns / kOutputs;
    decltype(stored_weights(packed, 0, 0)) weights[kBlocks];
    for (int b = 0; b < kBlocks; ++b) weights[b] = stored_weights(packed, column + b * kOutputs, x.inputs());
    Vector total[kBlocks][T][kParts] = {};
    for (i64 g = 0; g < x.groups(); ++g) {
      multiply_groups<T, kBlocks>(x.values() + g * kGroup * T, 0, weights, total);
      for (auto& each : weights) each.next();
    }
    for (int b = 0; b < kBlocks; ++b)
      for (int t = 0; t < T; ++t)
        for (int part = 0; part < kParts; ++part) store(y + t * outputs + b * kOutputs + part * kVector, total[b][t][part]);
  });
}

// Into how many parts rows are divided: so many that a part's inputs in float32 stay in a core's second cache while all weights
// pass by, but not so many that weights would be read for a few rows.
i64 number_of_parts(i64 rows, i64 inputs) {
  static const i64 cache = std::max<i64>(sysconf(_SC_LEVEL2_CACHE_SIZE), 1 << 19);
  const i64 most = std::max<i64>(cache / 4 * 3 / (inputs * static_cast<i64>(sizeof(float))), 8 * kTile);
  return (rows + most - 1) / most;
}

// Call `multiply` with a part of the rows, in tiles of up to `tile`, their results, and the first of each `step` outputs. The
// rows of one tile are read by each thread for itself: all would wait for one, and fetch from its core what it has read.
template <typename In, typename Out, typename Multiply>
void multiply_all(const In* x, Out* y, i64 rows, i64 inputs, i64 outputs, i64 step, i64 tile, i64 threads, const Multiply& multiply) {
  static thread_local Inputs callers;
  Inputs& shared = callers;  // by all threads of a region, each of which has a `callers` of its own
  const bool alone = rows <= tile;
  const i64 parts = number_of_parts(rows, inputs);
  for (i64 i = 0; i < parts; ++i) {
    const i64 first = i * rows / parts, count = (i + 1) * rows / parts - first;
    if (!alone) shared.read_together(x + first * inputs, count, inputs, tile, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      static thread_local Inputs own;
      if (alone) own.read(x, rows, inputs, tile);
      const Inputs& part = alone ? own : shared;
#pragma omp for schedule(static) nowait
      for (i64 column = 0; column < outputs; column += step) multiply(part, y + first * outputs + column, column);
    }
  }
}

template <typename In, typename Out>
void quantized(const In* x, const uint8_t* records, Out* y, i64 rows, i64 inputs, i64 outputs, i64 bits, i64 threads) {
  const i64 bytes = inputs / kGroup * (bits == 8 ? kRecordBytes<8> : kRecordBytes<4>);
  const auto multiply = bits == 8 ? quantized_block<8, Out> : quantized_block<4, Out>;
  const i64 tile = bits == 4 && rows <= kAsStored ? kFourBitTile : kTile;
  multiply_all(x, y, rows, inputs, outputs, kOutputs, tile, threads,
               [&](const Inputs& part, Out* to, i64 column) { multiply(part, records + column / kOutputs * bytes, to, outputs); });
}

template <typename In, typename Out>
void dense(const In* x, const In* packed, Out* y, i64 rows, i64 inputs, i64 outputs, i64 threads) {
  if (rows <= kFew) {
    const auto few = [&](const Inputs& part, Out* to, i64 column) { dense_few(part, packed, column, to, outputs); };
    return multiply_all(x, y, rows, inputs, outputs, kColumns, kTile, threads, few);
  }
  multiply_all(x, y, rows, inputs, outputs, kOutputs, kTile, threads,
               [&](const Inputs& part, Out* to, i64 column) { dense_block(part, stored_weights(packed, column, inputs), to, outputs); });
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

// y = x Wᵀ from bfloat16 weights, packed as [O / 64][I / 2][64][2]. I is a multiple of 32, O of 64.
void dense_linear(const bf16* x, const bf16* packed, bf16* y, i64 rows, i64 inputs, i64 outputs, i64 threads) {
  dense(x, packed, y, rows, inputs, outputs, threads);
}

// y = x Wᵀ from float32 weights, packed as [O / 16][I][16]; I and O as there.
void dense_linear_float32(const float* x, const float* packed, float* y, i64 rows, i64 inputs, i64 outputs, i64 threads) {
  dense(x, packed, y, rows, inputs, outputs, threads);
}

// bfloat16 with a result in float32.
void dense_logits(const bf16* x, const bf16* packed, float* y, i64 rows, i64 inputs, i64 outputs, i64 threads) {
  dense(x, packed, y, rows, inputs, outputs, threads);
}

}  // extern "C"
