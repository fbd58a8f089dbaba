// Scores of a few queries for a chunk of context: of the query heads of one key/value head.
#pragma once

#include <packing.h>

namespace {

template <i64 kSize>
class Scorer {
 public:
  // `queries`: rows of `kSize` values, `group` of them for each of `heads` key/value heads.
  void begin(const bf16* queries, i64, i64 group) { queries_ = queries, group_ = group; }

  // Write the scores of one head's rows, [group, kChunk], for the 64 tokens at `offsets`, of which `left` exist. `packed` is room for
  // their keys. Brings as much near meanwhile.
  void operator()(Multiplier& multiply, i64 head, const bf16* keys, const i64* offsets, i64 left, i64, float* scores, bf16* packed, Ahead& ahead) {
    pack_keys<kSize>(keys, offsets, left, packed, ahead);
    multiply(queries_ + head * group_ * kSize, kSize, group_, packed, kSize / 2, scores, kChunk, false, [&] { ahead.bring<kBeside>(); });
  }

 private:
  const bf16* queries_;
  i64 group_;
};

}  // namespace
