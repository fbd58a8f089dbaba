// Causal attention over the paged pool, without scores or contexts ever lying in memory as a whole.
//
// N query heads, K key/value heads, G = N / K, H head size: 64 or 128. `qkv` rows hold N + 2 K heads. A layer's pool is
// [slots, K, H], once for keys and once for values; token t of a sequence lies in slot
// table[t / block_size] * block_size + t % block_size.
//
// Prompts and single tokens go one way. The context is read in chunks of fixed places, whose keys and values become
// float32 once for all rows that see them. Each row keeps a running maximum and total, as in Milakov and Gimelshein,
// "Online normalizer calculation for softmax", 2018, and Dao et al., "FlashAttention", 2022. Scores are logarithms to the
// base of two.
//
// A pool of eight bits is [slots, K, H + 2] bytes: bytes.h has what they stand for.

#include "bytes.h"
#include <lines.h>

#include <algorithm>
#include <limits>
#include <type_traits>

namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr i64 kChunk = 64;       // tokens of context that are held as float32
constexpr i64 kTileTokens = 32;  // tokens of a prompt that go through the context together
constexpr i64 kRows = 3;         // rows that look at a chunk together
constexpr i64 kAtOnce = 4;       // registers of each row's sums
static_assert(kChunk % (kAtOnce * kVector) == 0);

struct Heads {
  i64 query, key_value, size;
  i64 group() const { return query / key_value; }
  i64 row() const { return (query + 2 * key_value) * size; }
};

// A sequence in a layer's pool, whose values are S: the type that is computed in, or bytes.
template <typename S>
struct Context {
  const S *keys, *values;
  const i64* table;
  i64 block_size, stride;  // stride between tokens: K heads of head_width<S> values

  i64 offset(i64 token) const { return (table[token / block_size] * block_size + token % block_size) * stride; }
};

// A chunk of one head's context: keys as [H][kChunk], values as [kChunk][H].
struct Chunk {
  const float *keys, *values;
};

// Rows of queries that look at one key/value head, and what they have found so far.
struct Rows {
  Lines<float> queries, sums, largest, totals, keys, values;

  void begin(i64 count, i64 size) {
    queries.resize(count * size);
    sums.assign(count * size, 0.0f);
    largest.assign(count, kMinusInfinity);
    totals.assign(count, 0.0f);
    keys.resize(kChunk * size);
    values.resize(kChunk * size);
  }
};

// Words of kVector tokens become columns of `to`: a float32 each, the two bfloat16 of a pair, or four bytes times the tokens'
// scales.
inline void put_columns(Words words[kVector], const float*, Vector, float* to) {
  for (i64 i = 0; i < kVector; ++i) store(to + i * kChunk, as_floats(words[i]));
}
inline void put_columns(Words words[kVector], const bf16*, Vector, float* to) {
  for (i64 i = 0; i < kVector; ++i) {
    store(to + 2 * i * kChunk, halves(words[i], false));
    store(to + (2 * i + 1) * kChunk, halves(words[i], true));
  }
}
inline void put_columns(Words words[kVector], const byte*, Vector scales, float* to) {
  for (i64 i = 0; i < kVector; ++i)
    for (int place = 0; place < 4; ++place) store(to + (4 * i + place) * kChunk, value_of(unsigned_bytes(words[i], 8 * place), scales));
}

// The scales of `count` heads at `offsets`, and zeros up to kVector. Only bytes have any.
template <typename S>
inline Vector scales_of(const S* heads, const i64* offsets, i64 count, i64 size) {
  alignas(64) float scales[kVector] = {};
  if constexpr (std::is_same_v<S, byte>)
    for (i64 t = 0, end = std::min(count, kVector); t < end; ++t) scales[t] = scale_of(heads + offsets[t], size);
  return load(scales);
}

// A head of `size` values becomes float32.
template <typename S>
inline void widen_head(const S* head, i64 size, float* to) {
  for (i64 h = 0; h < size; h += kVector) store(to + h, load(head + h));
}
inline void widen_head(const byte* head, i64 size, float* to) {
  const Vector scale = all(scale_of(head, size));
  for (i64 h = 0; h < size; h += kVector) store(to + h, value_of(load(head + h), scale));
}

// Tokens [begin, begin + count) of one head become float32. Beyond them lie zeros and what was there before: nobody looks at
// it. Has the chunk behind it brought near, as far as `length`: blocks lie anywhere, so the processor can't guess where.
template <typename S>
void widen(const Context<S>& context, i64 head, i64 size, i64 begin, i64 count, i64 length, float* keys, float* values) {
  constexpr i64 kPerWord = sizeof(float) / sizeof(S), kLine = 64 / sizeof(S);
  const i64 own = head * head_width<S>(size);
  i64 offsets[kChunk];
  for (i64 t = 0; t < count; ++t) offsets[t] = context.offset(begin + t) + own;
  for (i64 t = begin + kChunk, end = std::min(length, t + kChunk); t < end; ++t)
    for (i64 h = 0, at = context.offset(t) + own; h < head_width<S>(size); h += kLine) {
      _mm_prefetch(reinterpret_cast<const char*>(context.keys + at + h), _MM_HINT_T1);
      _mm_prefetch(reinterpret_cast<const char*>(context.values + at + h), _MM_HINT_T1);
    }
  for (i64 t = 0; t < count; t += kVector) {
    const Vector scales = scales_of(context.keys, offsets + t, count - t, size);
    for (i64 h = 0; h < size; h += kVector * kPerWord) {
      Words words[kVector];
      for (i64 i = 0; i < kVector; ++i) words[i] = t + i < count ? load_words(context.keys + offsets[t + i] + h) : Words();
      transpose(words);
      put_columns(words, context.keys, scales, keys + h * kChunk + t);
    }
  }
  for (i64 t = 0; t < count; ++t) widen_head(context.values + offsets[t], size, values + t * size);
}

// C[R, columns] += A[R, depth] B[depth, columns], one after the other over the depth. Columns: a multiple of kAtOnce registers.
template <int R>
void multiply(const float* a, i64 lda, i64 depth, const float* b, i64 ldb, i64 columns, float* c, i64 ldc) {
  for (i64 j = 0; j < columns; j += kAtOnce * kVector, b += kAtOnce * kVector, c += kAtOnce * kVector) {
    Vector acc[R][kAtOnce];
    for (int r = 0; r < R; ++r)
      for (int z = 0; z < kAtOnce; ++z) acc[r][z] = load(c + r * ldc + z * kVector);
    for (i64 k = 0; k < depth; ++k)
      for (int z = 0; z < kAtOnce; ++z) {
        const Vector column = load(b + k * ldb + z * kVector);
        for (int r = 0; r < R; ++r) acc[r][z] = multiply_add(column, all(a[r * lda + k]), acc[r][z]);
      }
    for (int r = 0; r < R; ++r)
      for (int z = 0; z < kAtOnce; ++z) store(c + r * ldc + z * kVector, acc[r][z]);
  }
}

// Of one row: scores of the first `count` tokens become weights, those of the first `hidden` of them zero, relative to its largest score so far. Returns what its sums
// so far are to be multiplied by.
inline float weigh(float* scores, i64 count, i64 hidden, float scale, float& largest, float& total) {
  for (i64 t = 0; t < hidden; ++t) scores[t] = kMinusInfinity;
  Vector top = all(kMinusInfinity);
  for (i64 t = 0; t < count; t += kVector) {
    const Vector seen = first_lanes(load(scores + t) * all(scale), count - t, kMinusInfinity);
    store(scores + t, seen);
    top = larger(seen, top);
  }
  const float now = std::max(largest, greatest(top));
  __m256 lanes = _mm256_setzero_ps();
  for (i64 t = 0; t < count; t += kVector) {
    const Vector weight = power_of_two(load(scores + t) - all(now));
    store(scores + t, weight);
    add_to(lanes, weight);
  }
  const float shrink = now == largest ? 1.0f : first(power_of_two(all(largest - now)));
  total = total * shrink + sum(lanes);
  largest = now;
  return shrink;
}

// Let R rows look at the first `count` tokens of a chunk, but for the first `hidden` of them.
template <int R>
void look(Rows& rows, i64 first, i64 size, i64 count, i64 hidden, const Chunk& chunk, float scale) {
  alignas(64) float scores[R * kChunk] = {};
  float* sums = &rows.sums[first * size];
  const i64 columns = (count + kAtOnce * kVector - 1) / (kAtOnce * kVector) * kAtOnce * kVector;
  multiply<R>(&rows.queries[first * size], size, size, chunk.keys, kChunk, columns, scores, kChunk);
  for (int r = 0; r < R; ++r) {
    const float shrink = weigh(scores + r * kChunk, count, hidden, scale, rows.largest[first + r], rows.totals[first + r]);
    if (shrink != 1.0f)
      for (i64 h = 0; h < size; h += kVector) store(sums + r * size + h, load(sums + r * size + h) * all(shrink));
  }
  multiply<R>(scores, kChunk, count, chunk.values, size, size, sums, size);
}

// Let the query heads of one key/value head of tokens [0, tokens) attend, of which token t sees `first_visible` + t tokens, or
// the last `window` of them.
template <typename T, typename S>
void attend(const T* qkv, const Context<S>& context, i64 tokens, i64 first_visible, i64 window, i64 head, const Heads& heads, float scale, T* out) {
  static thread_local Rows rows;
  const i64 group = heads.group(), size = heads.size, count = tokens * group;
  rows.begin(count, size);
  for (i64 r = 0; r < count; ++r) {
    const T* query = qkv + r / group * heads.row() + (head * group + r % group) * size;
    for (i64 h = 0; h < size; h += kVector) store(&rows.queries[r * size + h], load(query + h));
  }
  const Chunk chunk{rows.keys.data(), rows.values.data()};
  const i64 length = first_visible + tokens - 1;
  for (i64 begin = std::max<i64>(0, first_visible - window) / kChunk * kChunk; begin < length; begin += kChunk) {
    widen(context, head, size, begin, std::min(kChunk, length - begin), length, rows.keys.data(), rows.values.data());
    for (i64 t = std::max<i64>(0, begin + 1 - first_visible); t < tokens; ++t) {
      const i64 seen = std::min(kChunk, first_visible + t - begin), hidden = first_visible + t - window - begin;
      if (hidden >= seen) break;  // neither does a later token see anything of it
      for (i64 r = 0; r < group; r += kRows) {
        const i64 first = t * group + r;
        switch (std::min(kRows, group - r)) {
          case 1: look<1>(rows, first, size, seen, hidden, chunk, scale); break;
          case 2: look<2>(rows, first, size, seen, hidden, chunk, scale); break;
          default: look<kRows>(rows, first, size, seen, hidden, chunk, scale); break;
        }
      }
    }
  }
  for (i64 r = 0; r < count; ++r) {
    T* to = out + r / group * heads.query * size + (head * group + r % group) * size;
    for (i64 h = 0; h < size; h += kVector) store(to + h, load(&rows.sums[r * size + h]) / all(rows.totals[r]));
  }
}

// Rows [ends[b - 1], ends[b]) of qkv are the last ones of the lengths[b] tokens of sequence b, whose blocks are tables[b, :]. Each attends
// to itself and those before it, or to the last `window` of them. Sequences without rows come last. out: [rows, N, H].
template <typename T, typename S>
void decode(const T* qkv, const S* keys, const S* values, const i64* tables, i64 table_width, const i64* lengths, const i64* ends, T* out,
            i64 sequences, const Heads& heads, i64 block_size, i64 window, float scale, i64 threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
  for (i64 unit = 0; unit < sequences * heads.key_value; ++unit) {
    const i64 b = unit / heads.key_value;
    const Context<S> context{keys, values, tables + b * table_width, block_size, heads.key_value * head_width<S>(heads.size)};
    const i64 row = b == 0 ? 0 : ends[b - 1], tokens = ends[b] - row;
    if (tokens > 0)
      attend(qkv + row * heads.row(), context, tokens, lengths[b] - tokens + 1, window, unit % heads.key_value, heads, scale * kLog2E,
             out + row * heads.query * heads.size);
  }
}

// New tokens [start, start + tokens) of one sequence, already in the pool, attend to it causally. out: [T, N, H].
template <typename T, typename S>
void prefill(const T* qkv, const S* keys, const S* values, const i64* table, T* out, i64 start, i64 tokens, const Heads& heads,
             i64 block_size, i64 window, float scale, i64 threads) {
  const Context<S> context{keys, values, table, block_size, heads.key_value * head_width<S>(heads.size)};
  const i64 tiles = (tokens + kTileTokens - 1) / kTileTokens;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
  for (i64 unit = 0; unit < heads.key_value * tiles; ++unit) {
    const i64 begin = (tiles - 1 - unit / heads.key_value) * kTileTokens, count = std::min(kTileTokens, tokens - begin);  // longest first
    attend(qkv + begin * heads.row(), context, count, start + begin + 1, window, unit % heads.key_value, heads, scale * kLog2E,
           out + begin * heads.query * heads.size);
  }
}

}  // namespace

extern "C" {

void decode_attention(const bf16* qkv, const bf16* keys, const bf16* values, const i64* tables, i64 table_width, const i64* lengths,
                      const i64* ends, bf16* out, i64 sequences, i64 num_heads, i64 num_kv_heads, i64 size, i64 block_size, i64 window,
                      float scale, i64 threads) {
  decode(qkv, keys, values, tables, table_width, lengths, ends, out, sequences, {num_heads, num_kv_heads, size}, block_size, window, scale,
         threads);
}

void prefill_attention(const bf16* qkv, const bf16* keys, const bf16* values, const i64* table, bf16* out, i64 start, i64 tokens,
                       i64 num_heads, i64 num_kv_heads, i64 size, i64 block_size, i64 window, float scale, i64 threads) {
  prefill(qkv, keys, values, table, out, start, tokens, {num_heads, num_kv_heads, size}, block_size, window, scale, threads);
}

void decode_attention_float32(const float* qkv, const float* keys, const float* values, const i64* tables, i64 table_width, const i64* lengths,
                      const i64* ends, float* out, i64 sequences, i64 num_heads, i64 num_kv_heads, i64 size, i64 block_size, i64 window,
                      float scale, i64 threads) {
  decode(qkv, keys, values, tables, table_width, lengths, ends, out, sequences, {num_heads, num_kv_heads, size}, block_size, window, scale,
         threads);
}

void prefill_attention_float32(const float* qkv, const float* keys, const float* values, const i64* table, float* out, i64 start, i64 tokens,
                       i64 num_heads, i64 num_kv_heads, i64 size, i64 block_size, i64 window, float scale, i64 threads) {
  prefill(qkv, keys, values, table, out, start, tokens, {num_heads, num_kv_heads, size}, block_size, window, scale, threads);
}

void decode_attention_int8(const bf16* qkv, const byte* keys, const byte* values, const i64* tables, i64 table_width, const i64* lengths,
                      const i64* ends, bf16* out, i64 sequences, i64 num_heads, i64 num_kv_heads, i64 size, i64 block_size, i64 window,
                      float scale, i64 threads) {
  decode(qkv, keys, values, tables, table_width, lengths, ends, out, sequences, {num_heads, num_kv_heads, size}, block_size, window, scale,
         threads);
}

void prefill_attention_int8(const bf16* qkv, const byte* keys, const byte* values, const i64* table, bf16* out, i64 start, i64 tokens,
                       i64 num_heads, i64 num_kv_heads, i64 size, i64 block_size, i64 window, float scale, i64 threads) {
  prefill(qkv, keys, values, table, out, start, tokens, {num_heads, num_kv_heads, size}, block_size, window, scale, threads);
}

void decode_attention_int8_float32(const float* qkv, const byte* keys, const byte* values, const i64* tables, i64 table_width, const i64* lengths,
                      const i64* ends, float* out, i64 sequences, i64 num_heads, i64 num_kv_heads, i64 size, i64 block_size, i64 window,
                      float scale, i64 threads) {
  decode(qkv, keys, values, tables, table_width, lengths, ends, out, sequences, {num_heads, num_kv_heads, size}, block_size, window, scale,
         threads);
}

void prefill_attention_int8_float32(const float* qkv, const byte* keys, const byte* values, const i64* table, float* out, i64 start, i64 tokens,
                       i64 num_heads, i64 num_kv_heads, i64 size, i64 block_size, i64 window, float scale, i64 threads) {
  prefill(qkv, keys, values, table, out, start, tokens, {num_heads, num_kv_heads, size}, block_size, window, scale, threads);
}

}  // extern "C"
