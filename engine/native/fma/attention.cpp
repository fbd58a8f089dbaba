// Causal attention over the paged pool, without scores or contexts ever lying in memory as a whole.
//
// N query heads, K key/value heads, G = N / K, H head size: 64 or 128. `qkv` rows hold N + 2 K heads. A layer's pool is
// [slots, K, H], once for keys and once for values; token t of a sequence lies in slot
// table[t / block_size] * block_size + t % block_size.
//
// Prompts and single tokens go one way. The context is read in chunks of fixed places, keys before values: those of all heads, unless
// heads are shared out among threads, as a prompt's are. What comes next is brought near meanwhile. Keys and values become float32
// once for all rows that see them, but values are multiplied as they lie where these rows are few. Each row keeps a running maximum
// and total, as in Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, and Dao et al., "FlashAttention", 2022.
// Scores are logarithms to the base of two.
//
// A pool of eight bits is [slots, K, H + 2] bytes: bytes.h has what they stand for.

#include "bytes.h"
#include <context.h>
#include <lines.h>

#include <algorithm>
#include <type_traits>

namespace {

constexpr i64 kTileTokens = 32;  // tokens of a prompt that go through the context together
constexpr i64 kRows = 3;         // rows that look at a chunk together
constexpr i64 kAtOnce = 4;       // registers of each row's sums
constexpr i64 kFewRows = 6;      // rows that multiply values as they lie; for more they become float32 first
static_assert(kChunk % (kAtOnce * kVector) == 0);

// How many lines are brought near with each step of a product, and each part of keys or values that becomes float32. For one token of a
// group of three, these are about as many as are read.
template <typename S>
constexpr int kBeside = (sizeof(S) * kVector + 15) / 16;

// Rows of queries that look at key/value heads, and what they have found so far.
struct Rows {
  Lines<float> queries, scores, sums, largest, totals;

  void begin(i64 count, i64 size) {
    queries.resize(count * size);
    scores.resize(count * kChunk);
    sums.assign(count * size, 0.0f);
    largest.assign(count, kMinusInfinity);
    totals.assign(count, 0.0f);
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

// Some values of a head in float32, which are multiplied by `scale` if they are bytes.
template <typename S>
inline Vector widen(const S* values, Vector) {
  return load(values);
}
inline Vector widen(const byte* values, Vector scale) { return value_of(load(values), scale); }

// The scale of a head, in all lanes. Only bytes have one.
template <typename S>
inline Vector scale_of_all(const S*, i64) {
  return Vector();
}
inline Vector scale_of_all(const byte* head, i64 size) { return all(scale_of(head, size)); }

// One head's keys of `count` tokens, which lie at `offsets`, become float32: [H][kChunk]. Beyond them lie zeros and what was there
// before: nobody looks at it. Brings some lines near meanwhile.
template <typename S>
void widen_keys(const S* keys, i64 size, const i64* offsets, i64 count, float* to, Ahead& ahead) {
  constexpr i64 kPerWord = sizeof(float) / sizeof(S);
  for (i64 t = 0; t < count; t += kVector) {
    const Vector scales = scales_of(keys, offsets + t, count - t, size);
    for (i64 h = 0; h < size; h += kVector * kPerWord) {
      Words words[kVector];
      for (i64 i = 0; i < kVector; ++i) words[i] = t + i < count ? load_words(keys + offsets[t + i] + h) : Words();
      transpose(words);
      put_columns(words, keys, scales, to + h * kChunk + t);
      ahead.bring<kBeside<S>>();
    }
  }
}

// The same with its values: [kChunk][H].
template <typename S>
void widen_values(const S* values, i64 size, const i64* offsets, i64 count, float* to, Ahead& ahead) {
  for (i64 t = 0; t < count; ++t, to += size) {
    const Vector scale = scale_of_all(values + offsets[t], size);
    for (i64 h = 0; h < size; h += kVector) store(to + h, widen(values + offsets[t] + h, scale));
    ahead.bring<kBeside<S>>();
  }
}

// C[R, columns] (+)= A[R, depth] B[depth, columns], one after the other over the depth. Columns: a multiple of kAtOnce registers.
// `read(k, j)` gives a register of B from row k and column j on. Calls `meanwhile` at each step.
template <int R, bool kAdd, typename Read, typename Meanwhile>
void multiply(const float* a, i64 lda, i64 depth, const Read& read, i64 columns, float* c, i64 ldc, const Meanwhile& meanwhile) {
  for (i64 j = 0; j < columns; j += kAtOnce * kVector, c += kAtOnce * kVector) {
    Vector acc[R][kAtOnce] = {};
    if constexpr (kAdd)
      for (int r = 0; r < R; ++r)
        for (int z = 0; z < kAtOnce; ++z) acc[r][z] = load(c + r * ldc + z * kVector);
    for (i64 k = 0; k < depth; ++k) {
      for (int z = 0; z < kAtOnce; ++z) {
        const Vector column = read(k, j + z * kVector);
        for (int r = 0; r < R; ++r) acc[r][z] = multiply_add(column, all(a[r * lda + k]), acc[r][z]);
      }
      meanwhile();
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
    Vector seen = load(scores + t) * all(scale);
    if (count - t < kVector) seen = first_lanes(seen, count - t, kMinusInfinity);
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

// Find the weights of a chunk's first `count` tokens, but for the first `hidden` of them, for R rows. `keys`: [H][kChunk].
template <int R, typename Meanwhile>
void look(Rows& rows, i64 first, i64 size, i64 count, i64 hidden, const float* keys, float scale, const Meanwhile& meanwhile) {
  float *scores = &rows.scores[first * kChunk], *sums = &rows.sums[first * size];
  const i64 columns = (count + kAtOnce * kVector - 1) / (kAtOnce * kVector) * kAtOnce * kVector;
  const auto read = [&](i64 h, i64 t) { return load(keys + h * kChunk + t); };
  multiply<R, false>(&rows.queries[first * size], size, size, read, columns, scores, kChunk, meanwhile);
  for (int r = 0; r < R; ++r) {
    const float shrink = weigh(scores + r * kChunk, count, hidden, scale, rows.largest[first + r], rows.totals[first + r]);
    if (shrink != 1.0f)
      for (i64 h = 0; h < size; h += kVector) store(sums + r * size + h, load(sums + r * size + h) * all(shrink));
  }
}

// Let `tokens` tokens attend, of which token t sees `first_visible` + t tokens, or the last `window` of them: the query heads of
// key/value heads [first, last). `qkv` and `out` are the rows of these tokens. `after` is the context that is likely to be wanted next.
template <typename T, typename S>
void attend(const T* qkv, const Context<S>& context, i64 tokens, i64 first_visible, i64 window, const Heads& heads, i64 first, i64 last,
            float scale, T* out, const Context<S>& after, i64 after_length) {
  static thread_local Rows rows;
  static thread_local Lines<float> widened;
  const i64 group = heads.group(), size = heads.size, width = head_width<S>(size), each = tokens * group;
  const i64 length = first_visible + tokens - 1;
  const bool few = each <= kFewRows;
  rows.begin((last - first) * each, size);
  widened.resize(kChunk * size);
  float* const wide = widened.data();
  for (i64 head = first; head < last; ++head)
    for (i64 r = 0; r < each; ++r)
      for (i64 h = 0; h < size; h += kVector)
        store(&rows.queries[((head - first) * each + r) * size + h], load(qkv + heads.query_at(head, r) + h));
  i64 offsets[kChunk];
  for (i64 begin = first_chunk(first_visible, window); begin < length; begin += kChunk) {
    const i64 count = std::min(kChunk, length - begin);
    context.locate(begin, begin + count, offsets);
    Ahead ahead;
    ahead.add(context, first * width, (last - first) * width, begin, length, after, after_length);
    const auto meanwhile = [&] { ahead.bring<kBeside<S>>(); };
    // Calls `use` for up to kRows rows that see something: with their number, the first one, how many tokens they see up to, and how
    // many of these they don't see.
    const auto for_rows = [&](i64 head, const auto& use) {
      for (i64 t = std::max<i64>(0, begin + 1 - first_visible); t < tokens; ++t) {
        const i64 seen = std::min(kChunk, first_visible + t - begin), hidden = first_visible + t - window - begin;
        if (hidden >= seen) break;  // neither does a later token see anything of it
        for (i64 r = 0; r < group; r += kRows)
          with_constant<kRows>(std::min(kRows, group - r), [&](auto some) { use(some, (head - first) * each + t * group + r, seen, hidden); });
      }
    };
    for (i64 head = first; head < last; ++head) {
      widen_keys(context.of_head(head, width).keys, size, offsets, count, wide, ahead);
      for_rows(head, [&](auto some, i64 row, i64 seen, i64 hidden) { look<some>(rows, row, size, seen, hidden, wide, scale, meanwhile); });
    }
    for (i64 head = first; head < last; ++head) {
      const S* values = context.of_head(head, width).values;
      if (!few) widen_values(values, size, offsets, count, wide, ahead);
      for_rows(head, [&](auto some, i64 row, i64 seen, i64) {
        const float* weights = &rows.scores[row * kChunk];
        float* sums = &rows.sums[row * size];
        const auto as_they_lie = [&](i64 t, i64 h) { return widen(values + offsets[t] + h, scale_of_all(values + offsets[t], size)); };
        const auto widened = [&](i64 t, i64 h) { return load(wide + t * size + h); };
        if (few)
          multiply<some, true>(weights, kChunk, seen, as_they_lie, size, sums, size, meanwhile);
        else
          multiply<some, true>(weights, kChunk, seen, widened, size, sums, size, meanwhile);
      });
    }
  }
  for (i64 head = first; head < last; ++head)
    for (i64 r = 0, row = (head - first) * each; r < each; ++r, ++row)
      for (i64 h = 0; h < size; h += kVector)
        store(out + heads.result_at(head, r) + h, load(&rows.sums[row * size + h]) / all(rows.totals[row]));
}

// Rows [ends[b - 1], ends[b]) of qkv are the last ones of the lengths[b] tokens of sequence b, whose blocks are tables[b, :]. Each attends
// to itself and those before it, or to the last `window` of them. Sequences without rows come last. out: [rows, N, H].
template <typename T, typename S>
void decode(const T* qkv, const S* keys, const S* values, const i64* tables, i64 table_width, const i64* lengths, const i64* ends, T* out,
            i64 sequences, const Heads& heads, i64 block_size, i64 window, float scale, i64 threads) {
  sequences = with_rows(ends, sequences);
  const i64 parts = head_parts(lengths, sequences, window, threads, heads.key_value), heads_each = heads.key_value / parts;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && sequences * parts > 1)
  for (i64 unit = 0; unit < sequences * parts; ++unit) {
    const i64 b = unit / parts, first = unit % parts * heads_each, after = std::min(b + threads, sequences - 1);
    const auto context = [&](i64 b) {
      return Context<S>{keys, values, tables + b * table_width, block_size, heads.key_value * head_width<S>(heads.size)};
    };
    const i64 row = b == 0 ? 0 : ends[b - 1], tokens = ends[b] - row;
    if (tokens > 0)
      attend(qkv + row * heads.row(), context(b), tokens, lengths[b] - tokens + 1, window, heads, first, first + heads_each, scale * kLog2E,
             out + row * heads.query * heads.size, context(after), after > b && parts == 1 && lengths[after] <= window ? lengths[after] : 0);
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
    const i64 head = unit % heads.key_value;
    attend(qkv + begin * heads.row(), context, count, start + begin + 1, window, heads, head, head + 1, scale * kLog2E,
           out + begin * heads.query * heads.size, context, 0);
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
