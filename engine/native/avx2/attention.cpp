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

#include "common.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr i64 kChunk = 64;       // tokens of context that are held as float32
constexpr i64 kTileTokens = 32;   // tokens of a prompt that go through the context together
constexpr i64 kAtOnce = 8;        // registers of a row's sum of values

struct Heads {
  i64 query, key_value, size;
  i64 group() const { return query / key_value; }
  i64 row() const { return (query + 2 * key_value) * size; }
};

template <typename T>
struct Context {
  const T *keys, *values;
  const i64* table;
  i64 block_size, stride;  // stride between tokens, K * H
};

// Rows of queries in float32 that look at one key/value head, and what they have found so far.
struct Rows {
  std::vector<float> queries, sums, largest, totals, keys, values;

  void begin(i64 count, i64 size) {
    queries.resize(count * size);
    sums.assign(count * size, 0.0f);
    largest.assign(count, kMinusInfinity);
    totals.assign(count, 0.0f);
    keys.resize(kChunk * size);
    values.resize(kChunk * size);
  }
};

// Tokens [begin, begin + count) of one head as float32, and zeros up to a whole register of scores.
template <typename T>
void widen(const Context<T>& context, i64 head, i64 size, i64 begin, i64 count, float* keys, float* values) {
  for (i64 t = 0; t < count; ++t) {
    const i64 token = begin + t, slot = context.table[token / context.block_size] * context.block_size + token % context.block_size;
    const i64 at = slot * context.stride + head * size;
    for (i64 h = 0; h < size; h += kVector) {
      _mm256_storeu_ps(keys + t * size + h, load(context.keys + at + h));
      _mm256_storeu_ps(values + t * size + h, load(context.values + at + h));
    }
  }
  const i64 padded = (count + kVector - 1) / kVector * kVector;
  std::fill(keys + count * size, keys + padded * size, 0.0f);
}

// The sums of eight registers, in order.
inline __m256 sums_of(const __m256 v[8]) {
  const __m256 ab = _mm256_hadd_ps(v[0], v[1]), cd = _mm256_hadd_ps(v[2], v[3]), ef = _mm256_hadd_ps(v[4], v[5]), gh = _mm256_hadd_ps(v[6], v[7]);
  const __m256 low = _mm256_hadd_ps(ab, cd), high = _mm256_hadd_ps(ef, gh);
  return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

// Weights of one row for the first `count` tokens of a chunk, relative to its largest score so far. Returns what its sums
// so far are to be multiplied by.
float weigh(const float* query, const float* keys, i64 size, i64 count, float scale, float* weights, float& largest, float& total) {
  __m256 top = _mm256_set1_ps(kMinusInfinity);
  for (i64 t = 0; t < count; t += kVector) {
    __m256 products[8];
    for (int i = 0; i < 8; ++i) products[i] = _mm256_setzero_ps();
    for (i64 h = 0; h < size; h += kVector) {
      const __m256 q = _mm256_loadu_ps(query + h);
      for (int i = 0; i < 8; ++i) products[i] = _mm256_fmadd_ps(q, _mm256_loadu_ps(keys + (t + i) * size + h), products[i]);
    }
    const __m256 scores = _mm256_mul_ps(sums_of(products), _mm256_set1_ps(scale));
    const __m256 seen = _mm256_blendv_ps(_mm256_set1_ps(kMinusInfinity), scores, first_lanes(count - t));
    _mm256_storeu_ps(weights + t, seen);
    top = _mm256_max_ps(top, seen);
  }
  const float now = std::max(largest, greatest(top));
  __m256 lanes = _mm256_setzero_ps();
  for (i64 t = 0; t < count; t += kVector) {
    const __m256 weight = power_of_two(_mm256_sub_ps(_mm256_loadu_ps(weights + t), _mm256_set1_ps(now)));
    _mm256_storeu_ps(weights + t, weight);
    lanes = _mm256_add_ps(lanes, weight);
  }
  const float shrink = now == largest ? 1.0f : std::exp2(largest - now);
  total = total * shrink + sum(lanes);
  largest = now;
  return shrink;
}

// sums = sums * shrink + weights times values, token after token.
void add_values(const float* weights, const float* values, i64 size, i64 count, float shrink, float* sums) {
  for (i64 h = 0; h < size; h += kAtOnce * kVector) {
    __m256 acc[kAtOnce];
    for (int z = 0; z < kAtOnce; ++z) acc[z] = _mm256_mul_ps(_mm256_loadu_ps(sums + h + z * kVector), _mm256_set1_ps(shrink));
    for (i64 t = 0; t < count; ++t) {
      const __m256 weight = _mm256_broadcast_ss(weights + t);
      for (int z = 0; z < kAtOnce; ++z) acc[z] = _mm256_fmadd_ps(_mm256_loadu_ps(values + t * size + h + z * kVector), weight, acc[z]);
    }
    for (int z = 0; z < kAtOnce; ++z) _mm256_storeu_ps(sums + h + z * kVector, acc[z]);
  }
}

// Let the query heads of one key/value head of tokens [0, tokens) attend, of which token t sees `first_visible` + t tokens.
template <typename T>
void attend(const T* qkv, const Context<T>& context, i64 tokens, i64 first_visible, i64 head, const Heads& heads, float scale, T* out) {
  static thread_local Rows rows;
  const i64 group = heads.group(), size = heads.size, count = tokens * group;
  rows.begin(count, size);
  for (i64 r = 0; r < count; ++r) {
    const T* query = qkv + r / group * heads.row() + (head * group + r % group) * size;
    for (i64 h = 0; h < size; h += kVector) _mm256_storeu_ps(&rows.queries[r * size + h], load(query + h));
  }
  alignas(32) float weights[kChunk];
  const i64 length = first_visible + tokens - 1;
  for (i64 begin = 0; begin < length; begin += kChunk) {
    widen(context, head, size, begin, std::min(kChunk, length - begin), rows.keys.data(), rows.values.data());
    for (i64 r = 0; r < count; ++r) {
      const i64 seen = std::min(kChunk, first_visible + r / group - begin);
      if (seen <= 0) continue;
      const float shrink = weigh(&rows.queries[r * size], rows.keys.data(), size, seen, scale, weights, rows.largest[r], rows.totals[r]);
      add_values(weights, rows.values.data(), size, seen, shrink, &rows.sums[r * size]);
    }
  }
  for (i64 r = 0; r < count; ++r) {
    T* to = out + r / group * heads.query * size + (head * group + r % group) * size;
    const __m256 total = _mm256_set1_ps(rows.totals[r]);
    for (i64 h = 0; h < size; h += kVector) store(to + h, _mm256_div_ps(_mm256_loadu_ps(&rows.sums[r * size + h]), total));
  }
}

// Row b of qkv attends to the first lengths[b] tokens of its sequence, whose blocks are tables[b, :]. out: [B, N, H].
template <typename T>
void decode(const T* qkv, const T* keys, const T* values, const i64* tables, i64 table_width, const i64* lengths, T* out, i64 sequences,
            const Heads& heads, i64 block_size, float scale, i64 threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
  for (i64 unit = 0; unit < sequences * heads.key_value; ++unit) {
    const i64 b = unit / heads.key_value;
    const Context<T> context{keys, values, tables + b * table_width, block_size, heads.key_value * heads.size};
    attend(qkv + b * heads.row(), context, 1, lengths[b], unit % heads.key_value, heads, scale * kLog2E, out + b * heads.query * heads.size);
  }
}

// New tokens [start, start + tokens) of one sequence, already in the pool, attend to it causally. out: [T, N, H].
template <typename T>
void prefill(const T* qkv, const T* keys, const T* values, const i64* table, T* out, i64 start, i64 tokens, const Heads& heads,
             i64 block_size, float scale, i64 threads) {
  const Context<T> context{keys, values, table, block_size, heads.key_value * heads.size};
  const i64 tiles = (tokens + kTileTokens - 1) / kTileTokens;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
  for (i64 unit = 0; unit < heads.key_value * tiles; ++unit) {
    const i64 begin = (tiles - 1 - unit / heads.key_value) * kTileTokens, count = std::min(kTileTokens, tokens - begin);  // longest first
    attend(qkv + begin * heads.row(), context, count, start + begin + 1, unit % heads.key_value, heads, scale * kLog2E,
           out + begin * heads.query * heads.size);
  }
}

}  // namespace

extern "C" {

void decode_attention(const bf16* qkv, const bf16* keys, const bf16* values, const i64* tables, i64 table_width, const i64* lengths,
                      bf16* out, i64 sequences, i64 num_heads, i64 num_kv_heads, i64 size, i64 block_size, float scale, i64 threads) {
  decode(qkv, keys, values, tables, table_width, lengths, out, sequences, {num_heads, num_kv_heads, size}, block_size, scale, threads);
}

void prefill_attention(const bf16* qkv, const bf16* keys, const bf16* values, const i64* table, bf16* out, i64 start, i64 tokens,
                       i64 num_heads, i64 num_kv_heads, i64 size, i64 block_size, float scale, i64 threads) {
  prefill(qkv, keys, values, table, out, start, tokens, {num_heads, num_kv_heads, size}, block_size, scale, threads);
}

void decode_attention_float32(const float* qkv, const float* keys, const float* values, const i64* tables, i64 table_width, const i64* lengths,
                      float* out, i64 sequences, i64 num_heads, i64 num_kv_heads, i64 size, i64 block_size, float scale, i64 threads) {
  decode(qkv, keys, values, tables, table_width, lengths, out, sequences, {num_heads, num_kv_heads, size}, block_size, scale, threads);
}

void prefill_attention_float32(const float* qkv, const float* keys, const float* values, const i64* table, float* out, i64 start, i64 tokens,
                       i64 num_heads, i64 num_kv_heads, i64 size, i64 block_size, float scale, i64 threads) {
  prefill(qkv, keys, values, table, out, start, tokens, {num_heads, num_kv_heads, size}, block_size, scale, threads);
}

}  // extern "C"
