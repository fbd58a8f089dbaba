// The paged context of a sequence, as the attention reads it: where its tokens lie, and what is brought near.
#pragma once

#include "common.h"
#include <lines.h>
#include <near.h>

#include <algorithm>
#include <initializer_list>
#include <limits>

namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr i64 kChunk = 128;      // tokens of context whose scores are held at once
constexpr i64 kTileTokens = 16;  // tokens of a prompt that go through the context together

// The first chunk of which a token sees something that sees the last `window` of the first `length` tokens.
inline i64 first_chunk(i64 length, i64 window) { return std::max<i64>(0, length - window) / kChunk * kChunk; }

// Memory for values that are written before they are read. It only grows, and what was in it is gone then: nothing is copied or
// filled with zeros. Longer contexts come step by step, so it is larger than need be; the system gives only what is touched.
template <typename T>
class Room {
 public:
  Room() = default;
  Room(const Room&) = delete;
  ~Room() { clear(); }

  T* of(i64 count) {
    if (count > size_) {
      clear();
      values_ = OnLines<T>().allocate(count + count / 2);
      size_ = count + count / 2;
    }
    return values_;
  }

 private:
  void clear() {
    if (values_) OnLines<T>().deallocate(values_, size_);
    values_ = nullptr;
    size_ = 0;
  }

  T* values_ = nullptr;
  i64 size_ = 0;
};

struct Heads {
  i64 query, key_value, size;
  i64 group() const { return query / key_value; }
  i64 row() const { return (query + 2 * key_value) * size; }
};

// A sequence in a layer's pool, whose values are T.
template <typename T>
struct Context {
  const T *keys, *values;
  const i64* table;
  i64 block_size, stride;  // stride between tokens: K heads of `width` values

  Context of_head(i64 head, i64 width) const {
    return {keys + head * width, values + head * width, table, block_size, stride};
  }

  i64 slot(i64 token) const { return table[token / block_size] * block_size + token % block_size; }

  // Where the `count` tokens from `begin` on lie.
  void locate(i64 begin, i64 count, i64* offsets) const {
    for (i64 t = 0; t < count;) {
      const i64 first = slot(begin + t) - t, end = std::min(count, t + block_size - (begin + t) % block_size);
      for (; t < end; ++t) offsets[t] = (first + t) * stride;
    }
  }
};

// What is read soon. Blocks lie anywhere, so the processor can't guess where; and it takes only so many requests at a time, so they
// are made between other work, in the order in which the lines will be read.
class Ahead {
 public:
  // Then tokens [begin, end) of a context: `width` values of each, from one of these on, and so on block by block.
  template <typename T>
  void add(const Context<T>& context, std::initializer_list<const T*> from, i64 begin, i64 end, i64 width) {
    stride_ = context.stride * sizeof(T);
    for (i64 t = begin; t < end;) {
      const i64 slot = context.slot(t), rows = std::min(end - t, context.block_size - t % context.block_size);
      const bool whole = width == context.stride;
      for (const T* each : from)
        pieces_[count_++] = {reinterpret_cast<const char*>(each + slot * context.stride), whole ? 1 : rows,
                             (whole ? rows : 1) * width * i64(sizeof(T))};
      t += rows;
    }
    if (next_ == nullptr) begin_row();
  }

  // Ask for so many lines of the caches.
  template <int kLines>
  void bring() {
    if (next_ == nullptr) return;
    for (int line = 0; line < kLines; ++line) {
      _mm_prefetch(next_, kNearHint);
      next_ += kLine;
      if (next_ >= end_) begin_row();
    }
  }

 private:
  static constexpr i64 kLine = 64;  // bytes
  struct Piece {                    // of a block: rows of so many bytes
    const char* at;
    i64 rows, bytes;
  };
  Piece pieces_[3 * kChunk];
  i64 count_ = 0, done_ = 0, stride_ = 0;
  Piece rest_{};  // of the piece that is asked for: its further rows
  const char *next_ = nullptr, *end_ = nullptr;

  void begin_row() {
    if (rest_.rows == 0) return begin_piece();
    next_ = rest_.at - reinterpret_cast<uintptr_t>(rest_.at) % kLine, end_ = rest_.at + rest_.bytes;
    rest_.at += stride_, --rest_.rows;
  }
  __attribute__((noinline)) void begin_piece() {
    next_ = nullptr, end_ = nullptr;
    if (done_ < count_) rest_ = pieces_[done_++], begin_row();
  }
};

}  // namespace
