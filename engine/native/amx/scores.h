// Scores of a few queries for a chunk of context, by AMX's tiles: of the query heads of one key/value head.
//
// Keys are read where they lie, as the first factor: so they need not be packed. A result has a row for each token, then, and is
// turned over. The operations are those of packed keys, so the bits are, too.
#pragma once

#include <lines.h>
#include <packing.h>

namespace {

template <i64 kSize>
class Scorer {
 public:
  // `queries`: rows of `kSize` values, `group` of them for each of `heads` key/value heads.
  void begin(const bf16* queries, i64 heads, i64 group) {
    fours_ = (group + kFour - 1) / kFour, group_ = group;
    tiles_ = room_.of(heads * fours_ * kSize * kFour);
    for (i64 head = 0; head < heads; ++head)
      for (i64 q = 0; q < fours_ * kFour; ++q)
        for (i64 p = 0; p < kSize / 2; ++p) {
          bf16* to = tiles_ + ((head * fours_ + q / kFour) * kSize / 2 + p) * 2 * kFour + q % kFour * 2;
          const bf16* from = queries + (head * group + q) * kSize + 2 * p;
          to[0] = q < group ? from[0] : 0, to[1] = q < group ? from[1] : 0;
        }
  }

  // Write the scores of one head's rows, [group, kChunk], for the first `count` tokens at `offsets`, 32 or 64, of which `left`
  // exist. Brings as much near meanwhile.
  void operator()(Multiplier& multiply, i64 head, const bf16* keys, const i64* offsets, i64 left, i64 count, float* scores, bf16*, Ahead& ahead) {
    multiply.few(std::min(group_, kTile));
    alignas(64) float results[kColumns / kTile][kTile * kFour];
    alignas(64) bf16 gathered[2][kTile * kSize];
    for (i64 four = 0; four < fours_; ++four) {
      const bf16* queries = tiles_ + (head * fours_ + four) * kSize * kFour;
      for (i64 t = 0; t < count; t += 2 * kTile) {
        const auto one = keys_of(keys, offsets + t, left - t, gathered[0]), other = keys_of(keys, offsets + t + kTile, left - t - kTile, gathered[1]);
        Multiplier::few_queries<kSize>(one, other, queries, results[t / kTile]);
        if (four == 0) ahead.bring<kSize>();
      }
      for (i64 t = 0; t < count; t += kTile) turn(results[t / kTile], std::min(group_ - four * kFour, kFour), scores + four * kFour * kChunk + t);
    }
  }

 private:
  static constexpr i64 kFour = Multiplier::kFewQueries;
  i64 fours_, group_;
  bf16* tiles_;  // [heads][fours][kSize / 2][4][2]
  Room<bf16> room_;

  // The keys of 16 tokens, of which `left` exist: where they lie, or gathered if they end there or lie in several blocks. A block
  // has 8 tokens or more.
  static Multiplier::Tile keys_of(const bf16* keys, const i64* offsets, i64 left, bf16* gathered) {
    const i64 stride = offsets[1] - offsets[0];
    if (left >= kTile && offsets[kTile - 1] - offsets[0] == (kTile - 1) * stride) return {keys + offsets[0], stride};
    for (i64 i = 0; i < kTile; ++i) std::memcpy(gathered + i * kSize, i < left ? keys + offsets[i] : kNothing, kSize * sizeof(bf16));
    return {gathered, kSize};
  }

  // [16 tokens][4 queries] to up to four rows.
  static void turn(const float* from, i64 rows, float* to) {
    const __m512i evens = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(2));
    __m512 v[4], two[2][2];  // two[i][j]: queries 2 i and 2 i + 1 of eight tokens
    for (int i = 0; i < 4; ++i) v[i] = _mm512_load_ps(from + i * kVector);
    for (int j = 0; j < 2; ++j) {
      two[0][j] = _mm512_permutex2var_ps(v[2 * j], evens, v[2 * j + 1]);
      two[1][j] = _mm512_permutex2var_ps(v[2 * j], odds, v[2 * j + 1]);
    }
    for (i64 q = 0; q < rows; ++q) {
      const __m512 low = two[q / 2][0], high = two[q / 2][1];
      _mm512_storeu_ps(to + q * kChunk, q % 2 ? _mm512_shuffle_f32x4(low, high, 0xee) : _mm512_shuffle_f32x4(low, high, 0x44));
    }
  }
};

}  // namespace
