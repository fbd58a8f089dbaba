// Scores of a few queries for a chunk of context: of the query heads of one key/value head.
#pragma once

#include <packing.h>

namespace {

template <i64 kSize>
class Scorer {
 public:
  // `queries`: rows of `kSize` values, `group` of them for each of `heads` key/value heads.
  void begin(const bf16* queries, i64, i64 group) { queries_ = queries, group_ = group; }

  // Write the scores of one head's rows, [group, kChunk], for the first `count` tokens at `offsets`, a multiple of 32, of which
  // `left` exist. Brings as much near meanwhile.
  void operator()(Multiplier& multiply, i64 head, const bf16* keys, const i64* offsets, i64 left, i64 count, float* scores, Ahead<bf16>& ahead) {
    bf16* packed = room_.of(kColumns * kSize);
    for (i64 t = 0; t < count; t += kColumns) {
      pack_keys<kSize>(keys, offsets + t, left - t, packed, ahead);
      multiply(queries_ + head * group_ * kSize, kSize, group_, packed, kSize / 2, scores + t, kChunk, false);
    }
  }

 private:
  const bf16* queries_;
  i64 group_;
  Room<bf16> room_;
};

}  // namespace
