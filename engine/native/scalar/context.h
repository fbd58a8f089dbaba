// The paged context of a sequence, as the attention reads it: where its tokens lie, and what is brought near.
//
// It is compiled with a set's own common.h, which says how long a chunk is (kChunk), and near.h.
#pragma once

#include <common.h>
#include <near.h>

#include <algorithm>
#include <limits>

namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr i64 kAtATime = 64;  // tokens of which one head is read, then the next one

// The first chunk of which a token sees something that sees the last `window` of the first `length` tokens.
inline i64 first_chunk(i64 length, i64 window) { return std::max<i64>(0, length - window) / kChunk * kChunk; }

struct Heads {
  i64 query, key_value, size;
  i64 group() const { return query / key_value; }
  i64 row() const { return (query + 2 * key_value) * size; }
  // Where row r of a key/value head lies, the query heads of one token after the other: its query, and its result.
  i64 query_at(i64 head, i64 r) const { return r / group() * row() + (head * group() + r % group()) * size; }
  i64 result_at(i64 head, i64 r) const { return (r / group() * query + head * group() + r % group()) * size; }
};

// Into how many parts a sequence's heads go: one, unless threads that take whole sequences may wait for the others for more than a fifth
// of their time. Of each sequence, at most `window` tokens are looked at.
inline i64 head_parts(const i64* lengths, i64 sequences, i64 window, i64 threads, i64 heads) {
  i64 total = 0, longest = 0;
  for (i64 b = 0; b < sequences; ++b) {
    const i64 looked_at = std::min(lengths[b], window);
    total += looked_at;
    longest = std::max(longest, looked_at);
  }
  const i64 rounds = (sequences + threads - 1) / threads;
  // They take `rounds` of the longest ones at most; and the last one to end began while all threads were busy.
  const bool whole = 4 * threads * rounds * longest <= 5 * total || 4 * (threads - 1) * longest <= total;
  return whole ? 1 : heads;
}

// So many of the sequences have rows, which end before row ends[b]: the others come last.
inline i64 with_rows(const i64* ends, i64 sequences) {
  while (sequences > 1 && ends[sequences - 1] == ends[sequences - 2]) --sequences;
  return sequences;
}

// A sequence in a layer's pool, whose values are T.
template <typename T>
struct Context {
  const T *keys, *values;
  const i64* table;
  i64 block_size, stride;  // stride between tokens: K heads of `width` values

  Context of_head(i64 head, i64 width) const {
    return {keys + head * width, values + head * width, table, block_size, stride};
  }

  // Call `use` for the tokens [begin, end) of each block, with where the first one lies and how many they are.
  template <typename Use>
  void blocks(i64 begin, i64 end, const Use& use) const {
    for (i64 t = begin; t < end;) {
      const i64 within = t % block_size, tokens = std::min(end - t, block_size - within);
      use((table[t / block_size] * block_size + within) * stride, tokens);
      t += tokens;
    }
  }

  // Where tokens [begin, end) lie.
  void locate(i64 begin, i64 end, i64* offsets) const {
    blocks(begin, end, [&](i64 first, i64 tokens) {
      for (i64 t = 0; t < tokens; ++t) *offsets++ = first + t * stride;
    });
  }
};

// What is read soon. Blocks lie anywhere, so the processor can't guess where; and it takes only so many requests at a time, so they
// are made between other work, in the order in which the lines will be read.
class Ahead {
 public:
  // What is to be asked for while a chunk of a context of `length` tokens is read, all keys before all values: what lies kNearBytes
  // behind what is read. The chunk after it follows, or the first one of `after`. Of each token, `width` values from `first` on.
  template <typename T>
  void add(const Context<T>& context, i64 first, i64 width, i64 begin, i64 length, const Context<T>& after, i64 after_length) {
    const i64 near = std::clamp<i64>(kNearBytes / (width * sizeof(T)), kAtATime, kChunk);  // tokens
    const bool is_last = begin + kChunk >= length;
    const Context<T>& next = is_last ? after : context;
    const i64 end = std::min(begin + kChunk, length), next_begin = is_last ? 0 : end;
    const i64 next_end = std::min(next_begin + kChunk, is_last ? after_length : length);
    for (const T* each : {next.keys, next.values}) find(next, each + first, next_begin, next_end);
    add(context, context.keys + first, width, begin + near, end);
    add(context, context.values + first, width, begin, end);
    add(next, next.keys + first, width, next_begin, std::min(next_begin + near, next_end));
    begin_row();
  }

  // Ask for so many lines of the caches.
  template <int kLines>
  void bring() {
    if (next_ == nullptr) return;
    for (int line = 0; line < kLines; ++line) {
      _mm_prefetch(next_, kNearHint);
      next_ += kLine;
      if (next_ >= end_ && !begin_row()) return;
    }
  }

 private:
  static constexpr i64 kLine = 64, kPage = 4096;  // bytes
  struct Piece {  // of a block: rows of so many bytes
    const char* at;
    i64 bytes, rows, stride;
  };
  Piece pieces_[2 * kChunk];
  i64 count_ = 0, done_ = 0;
  Piece rest_{};                                 // further rows of the piece that is asked for
  const char *next_ = nullptr, *end_ = nullptr;  // of its row

  // Have the processor look up the pages of these tokens: looking up takes longer than bringing near, and would hold it up.
  template <typename T>
  static void find(const Context<T>& context, const T* from, i64 begin, i64 end) {
    context.blocks(begin, end, [&](i64 first, i64 tokens) {
      const char *at = reinterpret_cast<const char*>(from + first), *end = at + tokens * context.stride * sizeof(T);
      for (; at < end; at += kPage - reinterpret_cast<uintptr_t>(at) % kPage) _mm_prefetch(at, kNearHint);
    });
  }

  // Block by block, `width` values of each token from this pointer on.
  template <typename T>
  void add(const Context<T>& context, const T* from, i64 width, i64 begin, i64 end) {
    const i64 stride = context.stride * sizeof(T), bytes = width * sizeof(T);
    context.blocks(begin, end, [&](i64 first, i64 tokens) {
      const char* at = reinterpret_cast<const char*>(from + first);
      pieces_[count_++] = bytes == stride ? Piece{at, tokens * bytes, 1, 0} : Piece{at, bytes, tokens, stride};
    });
  }

  // Returns whether there is one.
  bool begin_row() {
    if (rest_.rows == 0) return begin_piece();
    next_ = rest_.at - reinterpret_cast<uintptr_t>(rest_.at) % kLine, end_ = rest_.at + rest_.bytes;
    rest_.at += rest_.stride, --rest_.rows;
    return true;
  }
  __attribute__((noinline)) bool begin_piece() {
    next_ = nullptr;
    if (done_ == count_) return false;
    rest_ = pieces_[done_++];
    return begin_row();
  }
};

}  // namespace
