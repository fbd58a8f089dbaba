// The paged context of a sequence, as the attention reads it: where its tokens lie, and what is brought near.
#pragma once

#include "common.h"
#include <lines.h>

#include <algorithm>
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

  // Where the `count` tokens from `begin` on lie.
  void locate(i64 begin, i64 count, i64* offsets) const {
    for (i64 t = 0; t < count;) {
      const i64 within = (begin + t) % block_size, end = std::min(count, t + block_size - within);
      const i64 first = (table[(begin + t) / block_size] * block_size + within - t) * stride;
      for (; t < end; ++t) offsets[t] = first + t * stride;
    }
  }
};

// Keys and values that are wanted soon. Blocks lie anywhere, so the processor can't guess where; and it takes only so many
// requests at a time, so they are made between other work, in the order of the addresses, which it can guess from.
template <typename T>
struct Ahead {
  static constexpr i64 kLine = 64 / sizeof(T);  // values of a line of the caches
  const T *keys, *values;
  i64 width;  // values of a token that are wanted, from here on
  i64 tokens = 0, token = 0, at = 0;
  i64 offsets[kChunk];

  void bring(i64 lines) {
    for (; lines > 0 && token < tokens; --lines) {
      _mm_prefetch(reinterpret_cast<const char*>(keys + offsets[token] + at), _MM_HINT_T1);
      _mm_prefetch(reinterpret_cast<const char*>(values + offsets[token] + at), _MM_HINT_T1);
      at += kLine;
      if (at >= width) at = 0, ++token;
    }
  }
};

}  // namespace
