// Matrix products with weights of four or eight bits, and with bfloat16 weights, for any number of rows. Results are
// bfloat16, or float32 for the output head.
//
// Quantized: 32 inputs of an output share a float16 scale and minimum, and weight = value * scale + minimum. Values are
// exact in bfloat16. Those of even pairs of inputs times inputs are added up one after the other, and those of odd pairs;
// then total += scale * (even + odd), total += minimum * sum of inputs. The values of 16 outputs and 32 inputs make a
// record: 16 scales, 16 minimums, then 16-bit words of four nibbles. Words go [z][output][input of a pair]; nibble n
// belongs to pair 4 z + n, and in eight bits nibbles 2 n and 2 n + 1 to pair 2 z + n.
//
// Up to kFewRows rows read the values as they are stored, kRows at a time. For more, those of a group and up to 48 outputs become
// bfloat16 once for up to kRowBlock rows, whose totals lie in memory meanwhile. Both do the same operations on the same values in
// the same order, so a row's bits do not tell which it was.

#include "common.h"
#include <lines.h>
#include <multiply.h>

#include <algorithm>

namespace {

constexpr i64 kGroup = 32, kOutputs = 16, kRows = 8;
constexpr i64 kTileRows = 4, kTileBlocks = 3;  // rows, and blocks of 16 outputs: 24 sums, and 7 loads for 12 products
constexpr i64 kRowBlock = 256;  // rows that share unpacked values: their totals, 48 KB, and their inputs stay in the second cache
constexpr i64 kAhead = 4096;  // bytes that few rows ask for ahead: the processor by itself stops at every page

template <bool kEightBits>
constexpr i64 kFewRows = kEightBits ? 2 * kRows : 4 * kRows;

template <bool kEightBits>
constexpr i64 kRecordBytes = 4 * kOutputs + kOutputs * kGroup / (kEightBits ? 1 : 2);

// The numbers from 0 to 15 in bfloat16. A look-up reads five bits, so the table holds every one twice.
alignas(64) constexpr bf16 kNibbles[32] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
                                           0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
                                           0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};

// The numbers that follow each other in a record: 16 scales, or 16 minimums.
inline __m512 numbers(const uint8_t* halves) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves))); }

// A record for many rows: numbers in float32, values in bfloat16, the pairs one after the other.
struct alignas(64) Unpacked {
  float scales[kOutputs], minimums[kOutputs];
  bf16 values[kGroup / 2][2 * kOutputs];
};

// Values of 16 outputs, group after group, as they are stored.
template <bool kEightBits>
struct Records {
  const uint8_t* record;
  i64 ahead;  // bytes from here to the records that are brought near meanwhile

  // Call `use` with each pair of a group and its values.
  template <typename Use>
  void pairs(const Use& use) const {
    constexpr int kPairs = kEightBits ? 2 : 4;  // pairs of a word
#pragma GCC unroll 8
    for (int z = 0; z < 16 / kPairs; ++z) {
      __m512i words = _mm512_loadu_si512(record + 4 * kOutputs + 64 * z);
#pragma GCC unroll 4
      for (int n = 0; n < kPairs; ++n) {
        use(kPairs * z + n, values(words));
        words = _mm512_srli_epi16(words, kEightBits ? 8 : 4);
      }
    }
  }
  void unpack(Unpacked& to) const {
    _mm512_store_ps(to.scales, numbers(record));
    _mm512_store_ps(to.minimums, numbers(record + 2 * kOutputs));
    pairs([&](int pair, __m512i values) __attribute__((always_inline)) { _mm512_store_si512(to.values[pair], values); });
  }
  void next() {
    record += kRecordBytes<kEightBits>;
    for (i64 line = 0; line < kRecordBytes<kEightBits>; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(record + ahead + line), _MM_HINT_T0);
  }

 private:
  // Of the lowest bits of each word. Eight bits have so few digits that the upper half of their float32 is exact.
  __m512i values(__m512i words) const {
    if constexpr (!kEightBits) return _mm512_permutexvar_epi16(words, _mm512_load_si512(kNibbles));
    const __m512i even = small_float(words), odd = small_float(_mm512_srli_epi32(words, 16));
    return _mm512_or_si512(_mm512_srli_epi32(even, 16), odd);
  }
  // The number in the lowest byte, in float32: with its sign's bit turned over, at the end of 2^23, it makes 2^23 + 128 more.
  static __m512i small_float(__m512i words) {
    const __m512i sum = _mm512_ternarylogic_epi32(words, _mm512_set1_epi32(0xff), _mm512_set1_epi32(0x4b000080), 0x6a);  // (a & b) ^ c
    return _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(sum), _mm512_set1_ps(0x1p23f + 128)));
  }
};

inline void put(bf16* p, __m512 v) { store(p, v); }
inline void put(float* p, __m512 v) { _mm512_storeu_ps(p, v); }

// T rows times 16 outputs. `sums` are the rows' sums of each group, for the minimums: those of a group are `all_rows` apart from those
// of the next one.
template <int T, bool kEightBits, typename Out>
void multiply_few(const bf16* x, i64 inputs, const float* sums, i64 all_rows, Records<kEightBits> weights, Out* y, i64 outputs) {
  const i64 groups = inputs / kGroup;
  __m512 total[T];
  for (int t = 0; t < T; ++t) total[t] = _mm512_setzero_ps();
  for (i64 g = 0; g < groups; ++g, weights.next()) {
    __m512 dot[T][2];
    for (int t = 0; t < T; ++t) dot[t][0] = dot[t][1] = _mm512_setzero_ps();
    weights.pairs([&](int pair, __m512i values) __attribute__((always_inline)) {
      for (int t = 0; t < T; ++t)
        dot[t][pair % 2] = _mm512_dpbf16_ps(dot[t][pair % 2], (__m512bh)values, repeat_pair(x + t * inputs + g * kGroup + 2 * pair));
    });
    const __m512 scale = numbers(weights.record), minimum = numbers(weights.record + 2 * kOutputs);
    for (int t = 0; t < T; ++t) {
      total[t] = _mm512_fmadd_ps(scale, _mm512_add_ps(dot[t][0], dot[t][1]), total[t]);
      total[t] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(sums[g * all_rows + t]), total[t]);
    }
  }
  for (int t = 0; t < T; ++t) put(y + t * outputs, total[t]);
}

// Up to kFewRows rows times 16 outputs, whose records stay near meanwhile.
template <bool kEightBits, typename Out>
void multiply_block(const bf16* x, i64 rows, i64 inputs, const float* sums, const uint8_t* records, Out* y, i64 outputs) {
  const Records<kEightBits> weights{records, kAhead};
  const i64 all_rows = rows;
  for (; rows > kRows; rows -= kRows, x += kRows * inputs, sums += kRows, y += kRows * outputs)
    multiply_few<kRows>(x, inputs, sums, all_rows, weights, y, outputs);
  switch (rows) {
    case 1: multiply_few<1>(x, inputs, sums, all_rows, weights, y, outputs); break;
    case 2: multiply_few<2>(x, inputs, sums, all_rows, weights, y, outputs); break;
    case 3: multiply_few<3>(x, inputs, sums, all_rows, weights, y, outputs); break;
    case 4: multiply_few<4>(x, inputs, sums, all_rows, weights, y, outputs); break;
    case 5: multiply_few<5>(x, inputs, sums, all_rows, weights, y, outputs); break;
    case 6: multiply_few<6>(x, inputs, sums, all_rows, weights, y, outputs); break;
    case 7: multiply_few<7>(x, inputs, sums, all_rows, weights, y, outputs); break;
    case 8: multiply_few<8>(x, inputs, sums, all_rows, weights, y, outputs); break;
  }
}

// Add a group's products of `rows` rows, a multiple of R, and 16 B outputs to `totals`, [rows][B][16], which begin as zeros with
// the first group and go to `y` with the last. The loop is over the rows of one group, not over the groups of some rows, so that
// all registers are left to the sums of the group; not inlined, or else values are kept in registers from where they are unpacked.
template <int R, int B, typename Out>
__attribute__((noinline)) void add_group(const bf16* x, i64 rows, i64 inputs, const float* sums, const Unpacked* records, float* totals,
                                         bool is_first, bool is_last, Out* y, i64 outputs) {
  const __mmask16 had = is_first ? 0 : 0xffff;
  const bf16* row[R];
  for (int r = 0; r < R; ++r) row[r] = x + r * inputs;
  for (; rows > 0; rows -= R, sums += R, totals += R * B * kOutputs, y += R * outputs) {
    __m512 dot[2][R][B];
    for (int r = 0; r < R; ++r)
      for (int b = 0; b < B; ++b) dot[0][r][b] = dot[1][r][b] = _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int pair = 0; pair < kGroup / 2; ++pair) {
      __m512bh values[B];
      for (int b = 0; b < B; ++b) values[b] = load_pairs(records[b].values[pair]);
      for (int r = 0; r < R; ++r) {
        const __m512bh both = repeat_pair(row[r] + 2 * pair);
        for (int b = 0; b < B; ++b) dot[pair % 2][r][b] = _mm512_dpbf16_ps(dot[pair % 2][r][b], values[b], both);
      }
    }
    for (int r = 0; r < R; ++r) {
      row[r] += R * inputs;
      _mm_prefetch(reinterpret_cast<const char*>(row[r] + R * inputs), _MM_HINT_T0);
    }
    for (int b = 0; b < B; ++b) {
      const __m512 scale = _mm512_load_ps(records[b].scales), minimum = _mm512_load_ps(records[b].minimums);
      for (int r = 0; r < R; ++r) {
        float* at = totals + (r * B + b) * kOutputs;
        const __m512 total = _mm512_fmadd_ps(scale, _mm512_add_ps(dot[0][r][b], dot[1][r][b]), _mm512_maskz_load_ps(had, at));
        _mm512_store_ps(at, _mm512_fmadd_ps(minimum, _mm512_set1_ps(sums[r]), total));
      }
    }
    if (is_last)
      for (int r = 0; r < R; ++r)
        for (int b = 0; b < B; ++b) put(y + r * outputs + b * kOutputs, _mm512_load_ps(totals + (r * B + b) * kOutputs));
  }
}

// Up to kRowBlock rows times 16 B outputs, whose records for the next 16 B outputs are brought near. The sums of a group are
// `all_rows` apart from those of the next one.
template <int B, bool kEightBits, typename Out>
void multiply_many(const bf16* x, i64 rows, i64 inputs, const float* sums, i64 all_rows, const uint8_t* records, Out* y, i64 outputs) {
  alignas(64) float totals[kRowBlock * B * kOutputs];
  Unpacked unpacked[B];
  const i64 groups = inputs / kGroup, bytes = groups * kRecordBytes<kEightBits>, whole = rows / kTileRows * kTileRows;
  Records<kEightBits> weights[B];
  for (int b = 0; b < B; ++b) weights[b] = {records + b * bytes, B * bytes};
  for (i64 g = 0; g < groups; ++g, x += kGroup, sums += all_rows) {
    for (int b = 0; b < B; ++b, weights[b - 1].next()) weights[b].unpack(unpacked[b]);
    const auto add = [&](auto group, i64 first, i64 count) {
      group(x + first * inputs, count, inputs, sums + first, unpacked, totals + first * B * kOutputs, g == 0, g == groups - 1,
            y + first * outputs, outputs);
    };
    add(add_group<kTileRows, B, Out>, 0, whole);
    switch (rows - whole) {
      case 1: add(add_group<1, B, Out>, whole, 1); break;
      case 2: add(add_group<2, B, Out>, whole, 2); break;
      case 3: add(add_group<3, B, Out>, whole, 3); break;
    }
  }
}

// A group of inputs of one row, each added to the one 16 places on.
inline __m512 halves(const bf16* x) { return _mm512_add_ps(load(x), load(x + kVector)); }

// Halves of a register are added up, of two registers at once; then quarters, eighths, and neighbours.
inline __m512 add_256(__m512 a, __m512 b) { return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee)); }
inline __m512 add_128(__m512 a, __m512 b) { return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)); }
inline __m512 add_64(__m512 a, __m512 b) { return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee)); }
inline __m512 add_32(__m512 a, __m512 b) { return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd)); }

// The sum of a group of inputs of one row.
inline float sum_of_row(const bf16* x) {
  const __m512 whole = halves(x), half = add_256(whole, whole), quarter = add_128(half, half), eighth = add_64(quarter, quarter);
  return _mm512_cvtss_f32(add_32(eighth, eighth));
}

// The sums of a group of inputs of 16 rows.
inline __m512 sums_of_rows(const bf16* x, i64 inputs) {
  const auto two = [&](int r) { return add_256(halves(x + r * inputs), halves(x + (r + 4) * inputs)); };
  const auto four = [&](int r) { return add_128(two(r), two(r + 8)); };
  return add_32(add_64(four(0), four(1)), add_64(four(2), four(3)));
}

// The sums of each group of inputs: [groups][rows].
void sum_groups(const bf16* x, i64 rows, i64 groups, float* sums) {
  const i64 inputs = groups * kGroup;
  i64 r = 0;
  for (; r + kVector <= rows; r += kVector)
    for (i64 g = 0; g < groups; ++g) _mm512_storeu_ps(sums + g * rows + r, sums_of_rows(x + r * inputs + g * kGroup, inputs));
  for (; r < rows; ++r)
    for (i64 g = 0; g < groups; ++g) sums[g * rows + r] = sum_of_row(x + r * inputs + g * kGroup);
}

template <bool kEightBits, typename Out>
void multiply_all(const bf16* x, const uint8_t* records, Out* y, i64 rows, i64 inputs, i64 outputs, i64 threads) {
  const i64 groups = inputs / kGroup, bytes = groups * kRecordBytes<kEightBits>, blocks = outputs / kOutputs;
  static thread_local Lines<float> buffer;
  buffer.resize(rows * groups);
  float* sums = buffer.data();
  sum_groups(x, rows, groups, sums);
  if (rows <= kFewRows<kEightBits>) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (i64 block = 0; block < blocks; ++block)
      multiply_block<kEightBits>(x, rows, inputs, sums, records + block * bytes, y + block * kOutputs, outputs);
    return;
  }
  const i64 parts = (blocks + kTileBlocks - 1) / kTileBlocks, row_blocks = (rows + kRowBlock - 1) / kRowBlock;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (i64 unit = 0; unit < row_blocks * parts; ++unit) {  // all outputs of a block of rows, which stays near meanwhile
    const i64 first = unit / parts * kRowBlock, block = unit % parts * kTileBlocks, count = std::min(rows - first, kRowBlock);
    const auto multiply = [&](auto many) {
      many(x + first * inputs, count, inputs, sums + first, rows, records + block * bytes, y + first * outputs + block * kOutputs, outputs);
    };
    switch (std::min(blocks - block, kTileBlocks)) {
      case 1: multiply(multiply_many<1, kEightBits, Out>); break;
      case 2: multiply(multiply_many<2, kEightBits, Out>); break;
      case 3: multiply(multiply_many<3, kEightBits, Out>); break;
    }
  }
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
  (bits == 8 ? multiply_all<true, bf16> : multiply_all<false, bf16>)(x, records, y, rows, inputs, outputs, threads);
}

// The same with a result in float32: logits in bfloat16 would be an eighth apart.
void quantized_logits(const bf16* x, const uint8_t* records, float* y, i64 rows, i64 inputs, i64 outputs, i64 bits, i64 threads) {
  (bits == 8 ? multiply_all<true, float> : multiply_all<false, float>)(x, records, y, rows, inputs, outputs, threads);
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
