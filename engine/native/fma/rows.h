// The rows of a matrix product: what goes in, in float32, and what comes out.
#pragma once

#include "common.h"
#include <lines.h>

#include <algorithm>

namespace {

constexpr i64 kGroup = 32;    // inputs
constexpr i64 kOutputs = 16;  // that are computed together
static_assert(kTile <= kVector && kGroup % kVector == 0);

// Sums of rows and 16 outputs, until they are whole.
struct Results {
  float* values;

  explicit Results(i64 rows) {
    static thread_local Lines<float> own;
    own.assign(rows * kOutputs, 0.0f);
    values = own.data();
  }

  template <typename Out>
  void write(i64 rows, Out* y, i64 outputs) const {
    for (i64 r = 0; r < rows; ++r)
      for (i64 i = 0; i < kOutputs; i += kVector) store(y + r * outputs + i, load(values + r * kOutputs + i));
  }
};

// Some rows in float32, in tiles: the inputs of a tile's rows as [inputs][rows of the tile], and the sums of
// their groups as [groups][rows of the tile].
class Inputs {
 public:
  // `tile`: rows of a tile at most, up to kTile.
  template <typename In>
  void read(const In* x, i64 rows, i64 inputs, i64 tile) {
    lay_out(rows, inputs, tile);
    for (i64 i = 0; i < tiles_; ++i) read_tile(x + first(i) * inputs, i);
  }

  // The same by several threads.
  template <typename In>
  void read_together(const In* x, i64 rows, i64 inputs, i64 tile, i64 threads) {
    lay_out(rows, inputs, tile);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (i64 i = 0; i < tiles_; ++i) read_tile(x + first(i) * inputs, i);
  }

  // Call `multiply` with each tile's number of rows, a constant, and with its inputs and sums from group `group` on, and its
  // results in `y`, [rows][16].
  template <typename Multiply>
  void for_tiles(i64 group, float* y, const Multiply& multiply) const {
    for (i64 i = 0; i < tiles_; ++i) {
      const float *values = &values_[i * value_stride() + group * kGroup * count(i)], *sums = &sums_[i * sum_stride() + group * count(i)];
      with_constant<kTile>(count(i), [&](auto rows) { multiply(rows, values, sums, y + first(i) * kOutputs); });
    }
  }

  const float* values() const { return values_.data(); }
  i64 rows() const { return rows_; }
  i64 inputs() const { return inputs_; }
  i64 groups() const { return inputs_ / kGroup; }

 private:
  void lay_out(i64 rows, i64 inputs, i64 tile) {
    rows_ = rows;
    inputs_ = inputs;
    tiles_ = (rows + tile - 1) / tile;
    values_.resize(tiles_ * value_stride());
    sums_.resize(tiles_ * sum_stride());
  }

  // About equal, since small tiles use the processor badly.
  i64 first(i64 tile) const { return tile * (rows_ / tiles_) + std::min(tile, rows_ % tiles_); }
  i64 count(i64 tile) const { return first(tile + 1) - first(tile); }
  i64 value_stride() const { return inputs_ * kTile + kVector; }
  i64 sum_stride() const { return inputs_ / kGroup * kTile; }

  template <typename In>
  void read_tile(const In* x, i64 tile) {
    const i64 rows = count(tile);
    float *to = &values_[tile * value_stride()], *sums = &sums_[tile * sum_stride()];
    for (i64 g = 0; g < inputs_; g += kGroup)
      for (i64 t = 0; t < rows; ++t) {
        __m256 lanes = _mm256_setzero_ps();
        for (i64 i = 0; i < kGroup; i += kVector) add_to(lanes, load(x + t * inputs_ + g + i));
        *sums++ = sum(lanes);
      }
    if (rows == 1) {
      for (i64 i = 0; i < inputs_; i += kVector) store(to + i, load(x + i));
      return;
    }
    // A register of columns is longer than a tile's rows: what is too much is written over by the next one.
    for (i64 i = 0; i < inputs_; i += kVector) {
      Words words[kVector] = {};
      for (i64 t = 0; t < rows; ++t) words[t] = as_words(load(x + t * inputs_ + i));
      transpose(words);
      for (i64 j = 0; j < kVector; ++j, to += rows) store(to, as_floats(words[j]));
    }
  }

  i64 rows_ = 0, inputs_ = 0, tiles_ = 0;
  Lines<float> values_, sums_;
};

}  // namespace
