// Matrix products by AMX's tiles: with weights of four or eight bits, which become bfloat16 as they are read, and with
// bfloat16 weights. For any number of rows; results are bfloat16, or float32 for the output head.
//
// 32 inputs of an output share a float16 scale and minimum, and weight = value * scale + minimum, rounded to bfloat16. So
// these products are those of the bfloat16 weights, bit for bit. record.h says how values lie in a record of 16 outputs and
// 32 inputs. It becomes a tile, a row for each output: then four bits are looked up among an output's 16 possible weights.
// The inputs are the other factor, so each tile of results has a row for each output, too, and is turned over at the end.

#include "common.h"
#include <lines.h>
#include <multiply.h>
#include <record.h>
#include <transpose.h>

namespace {

constexpr i64 kPair = 2 * kOutputs;     // outputs whose products are computed together: of two records
constexpr i64 kTileValues = kTile * kGroup;
constexpr i64 kNear = 384 * 1024;       // inputs of all rows that share unpacked weights: 768 KB stay in the second cache
constexpr i64 kLeastRows = 2 * kPair;   // but so many share them at least
constexpr i64 kRowBlock = 512;          // rows that go through weights in bfloat16 together

struct alignas(64) Tile {
  bf16 values[kTileValues];
};

// Unpacked weights, the two tiles of a group after those of the one before it: all groups, or the last ones, so that they stay
// near where no more rows need them.
struct Panel {
  static constexpr i64 kAll = -1, kLast = 7;  // all, and the last eight
  bf16* tiles;
  i64 kept;

  bf16* tile(i64 group, int n) const { return tiles + (2 * (group & kept) + n) * kTileValues; }
};

// N records of outputs become tiles, one group after the other.
template <int N, bool kEightBits>
class Unpacker {
 public:
  Unpacker(const uint8_t* records, i64 groups, Panel panel) : records_(records), groups_(groups), panel_(panel) { convert(0); }

  // Unpack group g; each in its turn. The numbers are a group ahead, so that they lie in memory when they are needed.
  void operator()(i64 g) {
    if (g + 1 < groups_) convert(g + 1);
    // Numbers are to be read from memory: what repeats one from a register is busy enough. And tiles are not to be written before
    // those of eight groups ago are loaded.
    asm volatile("" ::: "memory");
    for (int n = 0; n < N; ++n) {
      const uint8_t* record = at(n, g);
      for (i64 line = 0; line < kBytes; line += 64)  // the same of the next outputs
        _mm_prefetch(reinterpret_cast<const char*>(record + N * groups_ * kBytes + line), _MM_HINT_T0);
      unpack(record + 4 * kOutputs, numbers_[g % 2][n], panel_.tile(g, n));
    }
  }

 private:
  static constexpr i64 kBytes = kRecordBytes<kEightBits ? 8 : 4>;
  const uint8_t* records_;
  const i64 groups_;
  const Panel panel_;
  alignas(64) float numbers_[2][N][2 * kOutputs];  // scales and minimums

  const uint8_t* at(int n, i64 g) const { return records_ + (n * groups_ + g) * kBytes; }

  void convert(i64 g) {
    for (int n = 0; n < N; ++n) {
      const auto* halves = reinterpret_cast<const __m256i*>(at(n, g));
      _mm512_store_ps(numbers_[g % 2][n], _mm512_cvtph_ps(_mm256_loadu_si256(halves)));
      _mm512_store_ps(numbers_[g % 2][n] + kOutputs, _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1)));
    }
  }

  static __m512 weights(__m512 values, const float* numbers, int output) {
    return _mm512_fmadd_ps(values, _mm512_set1_ps(numbers[output]), _mm512_set1_ps(numbers[kOutputs + output]));
  }

  static void unpack(const uint8_t* values, const float* numbers, bf16* tile) {
    if constexpr (kEightBits) {
#pragma GCC unroll 16
      for (int o = 0; o < kOutputs; ++o) {
        const auto* bytes = reinterpret_cast<const __m128i*>(values + o * kGroup);
        const __m512 lower = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes)));
        const __m512 upper = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + 1)));
        _mm512_store_si512(tile + o * kGroup, (__m512i)_mm512_cvtne2ps_pbh(weights(upper, numbers, o), weights(lower, numbers, o)));
      }
      return;
    }
    const __m512 all = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i low = _mm512_set1_epi16(15), second = _mm512_set1_epi16(16);
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; o += 2) {  // two tables of 16 weights make a register
      const __m512i words = _mm512_loadu_si512(values + o / 4 * 64);
      const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(weights(all, numbers, o + 1), weights(all, numbers, o));
      const __m512i one = _mm512_and_si512(_mm512_srli_epi16(words, o % 4 * 4), low);
      const __m512i other = _mm512_ternarylogic_epi32(_mm512_srli_epi16(words, o % 4 * 4 + 4), low, second, 0xea);  // (a & b) | c
      _mm512_store_si512(tile + o * kGroup, _mm512_permutexvar_epi16(one, table));
      _mm512_store_si512(tile + (o + 1) * kGroup, _mm512_permutexvar_epi16(other, table));
    }
  }
};

// A tile of rows' inputs as the second factor of a product: [16 pairs][16 rows][2]. There are no rows from `count` on: zeros.
void pack_rows(const bf16* x, i64 count, i64 inputs, bf16* tile) {
  __m512i rows[kTile];
  for (i64 r = 0; r < kTile; ++r) rows[r] = r < count ? _mm512_loadu_si512(x + r * inputs) : _mm512_setzero_si512();
  transpose(rows);
  for (i64 r = 0; r < kTile; ++r) _mm512_store_si512(tile + r * kGroup, rows[r]);
}

inline void put(bf16* p, __m512 v) { store(p, v); }
inline void put(float* p, __m512 v) { _mm512_storeu_ps(p, v); }
inline void put_two(bf16* p, __m512 low, __m512 high) { _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(high, low)); }
inline void put_two(float* p, __m512 low, __m512 high) { put(p, low), put(p + kVector, high); }

// N tiles of results, an output to a row, become up to 16 rows of y.
template <int N, typename Out>
void put_rows(const float (*tiles)[kTile * kTile], i64 count, Out* y, i64 outputs) {
  __m512i columns[N][kTile];
  for (int n = 0; n < N; ++n) {
    for (i64 o = 0; o < kTile; ++o) columns[n][o] = _mm512_load_si512(tiles[n] + o * kTile);
    transpose(columns[n]);
  }
  for (i64 r = 0; r < kTile; ++r) {
    if (r >= count) return;
    if constexpr (N > 1) put_two(y + r * outputs, _mm512_castsi512_ps(columns[0][r]), _mm512_castsi512_ps(columns[1][r]));
    else put(y + r * outputs, _mm512_castsi512_ps(columns[0][r]));
  }
}

// Up to 16 M packed rows times N records of outputs, whose tiles `prepare` makes one group after the other, before they are needed.
template <int M, int N, typename Out, typename Prepare>
inline void multiply_tiles(const bf16* packed, i64 rows, i64 groups, Panel panel, Out* y, i64 outputs, Prepare& prepare) {
  alignas(64) float results[M][N][kTile * kTile];
  constexpr i64 kRow = 64;  // bytes
  _tile_zero(0);
  if constexpr (N > 1) _tile_zero(1);
  if constexpr (M > 1) _tile_zero(2);
  if constexpr (M > 1 && N > 1) _tile_zero(3);
  prepare(0);
  for (i64 g = 0; g < groups; ++g, packed += kTileValues) {
    if (g + 1 < groups) prepare(g + 1);
    asm volatile("" ::: "memory");  // the intrinsics do not tell the compiler what they read
    _tile_loadd(4, panel.tile(g, 0), kRow);
    _tile_loadd(6, packed, kRow);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N > 1) {
      _tile_loadd(5, panel.tile(g, 1), kRow);
      _tile_dpbf16ps(1, 5, 6);
    }
    if constexpr (M > 1) {
      _tile_loadd(7, packed + groups * kTileValues, kRow);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (M > 1 && N > 1) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, results[0][0], kRow);
  if constexpr (N > 1) _tile_stored(1, results[0][1], kRow);
  if constexpr (M > 1) _tile_stored(2, results[1][0], kRow);
  if constexpr (M > 1 && N > 1) _tile_stored(3, results[1][1], kRow);
  asm volatile("" ::: "memory");
  for (int m = 0; m < M; ++m) put_rows<N>(results[m], rows - m * kTile, y + m * kTile * outputs, outputs);
}

// Packed rows times N records of outputs. The first rows' products and the unpacking go on side by side.
template <int N, bool kEightBits, typename Out>
void multiply_outputs(const bf16* packed, i64 rows, i64 groups, const uint8_t* records, bf16* tiles, Out* y, i64 outputs) {
  const Panel panel{tiles, rows > 2 * kTile ? Panel::kAll : Panel::kLast};
  Unpacker<N, kEightBits> unpack(records, groups, panel);
  const auto multiply = [&](i64 first, auto& prepare) {
    const bf16* from = packed + first * groups * kGroup;
    Out* to = y + first * outputs;
    if (rows - first > kTile) multiply_tiles<2, N>(from, rows - first, groups, panel, to, outputs, prepare);
    else multiply_tiles<1, N>(from, rows - first, groups, panel, to, outputs, prepare);
  };
  auto nothing = [](i64) {};
  multiply(0, unpack);
  for (i64 first = 2 * kTile; first < rows; first += 2 * kTile) multiply(first, nothing);
}

template <bool kEightBits, typename Out>
void quantized(const bf16* x, const uint8_t* records, Out* y, i64 rows, i64 inputs, i64 outputs, i64 threads) {
  static thread_local Room<Tile> room;
  const i64 groups = inputs / kGroup, bytes = groups * kRecordBytes<kEightBits ? 8 : 4>;
  const i64 most = std::max(kNear / inputs, kLeastRows), parts = (rows + most - 1) / most;
  const i64 together = parts > 1 ? (rows / parts / kPair + 1) * kPair : rows;  // no part is so small that unpacking takes its time
  bf16* packed = room.of((together + kTile - 1) / kTile * groups)->values;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    static thread_local Room<Tile> own;
    bf16* tiles = own.of(2 * std::max(groups, Panel::kLast + 1))->values;
    Multiplier shaped(kTile);
    for (i64 first = 0; first < rows; first += together) {
      const i64 count = std::min(rows - first, together);
      const bf16* from = x + first * inputs;
#pragma omp for schedule(static)
      for (i64 tile = 0; tile < (count + kTile - 1) / kTile * groups; ++tile) {
        const i64 row = tile / groups * kTile;
        pack_rows(from + row * inputs + tile % groups * kGroup, count - row, inputs, packed + tile * kTileValues);
      }
#pragma omp for schedule(static)
      for (i64 output = 0; output < outputs; output += kPair) {
        const uint8_t* stored = records + output / kOutputs * bytes;
        Out* to = y + first * outputs + output;
        if (output + kOutputs < outputs) multiply_outputs<2, kEightBits>(packed, count, groups, stored, tiles, to, outputs);
        else multiply_outputs<1, kEightBits>(packed, count, groups, stored, tiles, to, outputs);
      }
    }
  }
}

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
