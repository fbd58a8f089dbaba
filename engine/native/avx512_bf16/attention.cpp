// Causal attention over the paged pool, without scores or contexts ever lying in memory as a whole.
//
// N query heads, K key/value heads, G = N / K, H head size: 64 or 128. `qkv` rows hold N + 2 K heads. A layer's pool is
// [slots, K, H], once for keys and once for values; token t of a sequence lies in slot
// table[t / block_size] * block_size + t % block_size.
//
// Prompts and single tokens do the same operations. The context is read in chunks of fixed places, packed for the products
// with all rows that see them. Each row keeps a running maximum and total, as in Milakov and Gimelshein, "Online normalizer
// calculation for softmax", 2018, and Dao et al., "FlashAttention", 2022. Scores are logarithms to the base of two.

#include <context.h>
#include <multiply.h>
#include <packing.h>
#include <scores.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr i64 kTileTokens = 16;  // tokens of a prompt that go through the context together

// Scores of one row over a chunk become weights in bfloat16, relative to the largest score so far. Where kMasked, only the
// first `visible` keys count, but for the first `hidden` of them. Returns what the row's sums so far are to be multiplied by.
template <bool kMasked>
inline float weigh_row(const float* scores, bf16* weights, i64 length, i64 visible, i64 hidden, float scale, float& largest, float& total) {
  const auto lanes = [&](i64 t) -> __mmask16 { return kMasked ? first_lanes(visible - t) & ~first_lanes(hidden - t) : 0xffff; };
  __m512 top = _mm512_set1_ps(kMinusInfinity);
  for (i64 t = 0; t < length; t += kVector) top = _mm512_mask_max_ps(top, lanes(t), top, _mm512_loadu_ps(scores + t));
  const float now = std::max(largest, _mm512_reduce_max_ps(top) * scale);
  __m512 sum = _mm512_setzero_ps();
  for (i64 t = 0; t < length; t += kVector) {
    const __m512 gap = _mm512_fmsub_ps(_mm512_loadu_ps(scores + t), _mm512_set1_ps(scale), _mm512_set1_ps(now));
    const __m512 weight = _mm512_maskz_mov_ps(lanes(t), power_of_two(gap));
    store(weights + t, weight);
    sum = _mm512_add_ps(sum, weight);
  }
  const float shrink = now == largest ? 1.0f : std::exp2(largest - now);
  total = total * shrink + _mm512_reduce_add_ps(sum);
  largest = now;
  return shrink;
}

// A chunk of one head's context, packed: keys of each 64 tokens, values of each 64 of H.
struct Packed {
  const bf16 *keys, *values;
  i64 stride;  // between the values of each 64 of H
};

// Rows of queries that look at key/value heads, and what they have found so far.
struct Rows {
  std::vector<bf16> queries, weights;
  std::vector<float> scores, sums, largest, totals;

  void begin(i64 count, i64 size) {
    queries.resize(count * size);
    weights.resize(count * kChunk);
    scores.resize(count * kChunk);
    sums.assign(count * size, 0.0f);
    largest.assign(count, kMinusInfinity);
    totals.assign(count, 0.0f);
  }

  // Let rows [first, last) look at the chunk's first `count` tokens, a multiple of 64, of which row r may see visible(r), but for
  // those that lie before its `window`. A row that sees nothing of a chunk stays as it is.
  template <typename Visible>
  void look(Multiplier& multiply, i64 first, i64 last, i64 size, const Packed& chunk, i64 count, i64 window, float scale, const Visible& visible) {
    for (i64 t = 0; t < count; t += kColumns)
      multiply(&queries[first * size], size, last - first, chunk.keys + t * size, size / 2, &scores[first * kChunk + t], kChunk, false);
    weigh(multiply, first, last, size, chunk, count, window, scale, visible);
  }

  // The same where the scores are there already.
  template <typename Visible>
  void weigh(Multiplier& multiply, i64 first, i64 last, i64 size, const Packed& chunk, i64 count, i64 window, float scale, const Visible& visible) {
    for (i64 r = first; r < last; ++r) {
      const i64 hidden = visible(r) - window;
      const auto weigh = visible(r) < count || hidden > 0 ? weigh_row<true> : weigh_row<false>;
      const float shrink = weigh(&scores[r * kChunk], &weights[r * kChunk], count, visible(r), hidden, scale, largest[r], totals[r]);
      if (shrink != 1.0f)
        for (i64 h = 0; h < size; h += kVector) {
          float* at = &sums[r * size + h];
          _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), _mm512_set1_ps(shrink)));
        }
    }
    for (i64 h = 0; h < size; h += kColumns)
      multiply(&weights[first * kChunk], kChunk, last - first, chunk.values + h / kColumns * chunk.stride, count / 2, &sums[first * size + h], size, true);
  }

  void finish(i64 row, i64 size, bf16* out) const {
    for (i64 h = 0; h < size; h += kVector)
      store(out + h, _mm512_div_ps(_mm512_loadu_ps(&sums[row * size + h]), _mm512_set1_ps(totals[row])));
  }
};

// The first chunk of which a token sees something that sees the last `window` of the first `length` tokens.
inline i64 first_chunk(i64 length, i64 window) { return std::max<i64>(0, length - window) / kChunk * kChunk; }

// The tokens of a chunk that is packed, if the context ends after `left` tokens.
inline i64 chunk_tokens(i64 left) { return std::min(kChunk, (left + kColumns - 1) / kColumns * kColumns); }

// One sequence, key/value heads [first, last). `q` and `out` are rows of all query heads. `after` is the context that is likely
// to be wanted next.
void decode_sequence(const bf16* q, const Context<bf16>& context, i64 length, i64 window, const Heads& heads, i64 first, i64 last, float scale,
                     bf16* out, const Context<bf16>& after, i64 after_length) {
  static thread_local Rows rows;
  static thread_local Scorer scorer;
  static thread_local Room<bf16> buffer;
  Multiplier multiply;
  const i64 group = heads.group(), size = heads.size, count_rows = (last - first) * group, own = first * group * size;
  scorer.begin(multiply, q + own, last - first, group, size);
  rows.begin(count_rows, size);
  bf16* values = buffer.of(kChunk * size);
  i64 offsets[kChunk];
  for (i64 begin = first_chunk(length, window); begin < length; begin += kChunk) {
    const i64 left = length - begin, count = chunk_tokens(left);
    context.locate(begin, std::min(left, kChunk), offsets);
    const bool is_last = left <= kChunk;
    const Context<bf16>& next = is_last ? after : context;
    Ahead<bf16> ahead{next.keys + first * size, next.values + first * size, (last - first) * size};
    ahead.tokens = std::min(is_last ? after_length : left - kChunk, kChunk);
    next.locate(is_last ? 0 : begin + kChunk, ahead.tokens, ahead.offsets);
    for (i64 head = first; head < last; ++head) {
      const Context<bf16> here = context.of_head(head, size);
      const i64 row = (head - first) * group;
      scorer(multiply, head - first, here.keys, offsets, left, count, &rows.scores[row * kChunk], ahead);
      for (i64 t = 0; t < count; t += kColumns)
        pack_values<false>(here.values, size, offsets + t, left - t, values + t * kColumns, kChunk * kColumns, ahead);
      rows.weigh(multiply, row, row + group, size, {nullptr, values, kChunk * kColumns}, count, window, scale, [&](i64) { return left; });
    }
  }
  for (i64 r = 0; r < count_rows; ++r) rows.finish(r, size, out + own + r * size);
}

// Tokens [begin, end) of the new ones, all query heads of one key/value head, whose whole context is packed.
void prefill_tile(const bf16* qkv, i64 begin, i64 end, i64 start, i64 window, i64 head, const Heads& heads, const Packed& context,
                  float scale, bf16* out) {
  static thread_local Rows rows;
  Multiplier multiply;
  const i64 group = heads.group(), size = heads.size, count_rows = (end - begin) * group, length = start + end;
  rows.begin(count_rows, size);
  for (i64 r = 0; r < count_rows; ++r)
    std::memcpy(&rows.queries[r * size], qkv + (begin + r / group) * heads.row() + (head * group + r % group) * size, size * sizeof(bf16));
  for (i64 first = first_chunk(start + begin + 1, window); first < length; first += kChunk) {
    const Packed chunk{context.keys + first * size, context.values + first * kColumns, context.stride};
    const auto visible = [&](i64 r) { return start + begin + r / group + 1 - first; };
    rows.look(multiply, 0, count_rows, size, chunk, chunk_tokens(length - first), window, scale, visible);
  }
  for (i64 r = 0; r < count_rows; ++r)
    rows.finish(r, size, out + (begin + r / group) * heads.query * size + (head * group + r % group) * size);
}

}  // namespace

extern "C" {

// Row b of qkv attends to the first lengths[b] tokens of its sequence, whose blocks are tables[b, :], or to the last `window` of
// them. out: [B, N, H].
void decode_attention(const bf16* qkv, const bf16* keys, const bf16* values, const i64* tables, i64 table_width, const i64* lengths,
                      bf16* out, i64 sequences, i64 num_heads, i64 num_kv_heads, i64 size, i64 block_size, i64 window, float scale,
                      i64 threads) {
  const Heads heads{num_heads, num_kv_heads, size};
  const i64 parts = sequences >= threads ? 1 : num_kv_heads, heads_each = num_kv_heads / parts;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && sequences * parts > 1)
  for (i64 unit = 0; unit < sequences * parts; ++unit) {
    const i64 b = unit / parts, first = unit % parts * heads_each, after = std::min(b + threads, sequences - 1);
    const auto context = [&](i64 b) { return Context<bf16>{keys, values, tables + b * table_width, block_size, num_kv_heads * size}; };
    decode_sequence(qkv + b * heads.row(), context(b), lengths[b], window, heads, first, first + heads_each, scale * kLog2E,
                    out + b * num_heads * size, context(after), after > b && parts == 1 && lengths[after] <= window ? lengths[after] : 0);
  }
}

// New tokens [start, start + tokens) of one sequence, already in the pool, attend to it causally. out: [T, N, H].
void prefill_attention(const bf16* qkv, const bf16* keys, const bf16* values, const i64* table, bf16* out, i64 start, i64 tokens,
                       i64 num_heads, i64 num_kv_heads, i64 size, i64 block_size, i64 window, float scale, i64 threads) {
  const Heads heads{num_heads, num_kv_heads, size};
  const Context<bf16> context{keys, values, table, block_size, num_kv_heads * size};
  const i64 length = start + tokens, padded = (length + kColumns - 1) / kColumns * kColumns;
  const i64 hidden = first_chunk(start + 1, window), blocks = (padded - hidden) / kColumns;
  static thread_local Room<bf16> buffer;
  bf16 *packed_keys = buffer.of(2 * num_kv_heads * padded * size), *packed_values = packed_keys + num_kv_heads * padded * size;
  bool numbers = true;
#pragma omp parallel for num_threads(threads) reduction(&& : numbers) if (threads > 1)
  for (i64 unit = 0; unit < num_kv_heads * blocks; ++unit) {
    const i64 head = unit / blocks, at = head * padded * size, begin = hidden + unit % blocks * kColumns;
    const i64 count = std::min(length - begin, kColumns);
    i64 offsets[kColumns];
    context.locate(begin, count, offsets);
    Ahead<bf16> nothing{};
    const Context<bf16> here = context.of_head(head, size);
    pack_keys(here.keys, size, offsets, count, packed_keys + at + begin * size, nothing);
    const bool whole = pack_values<true>(here.values, size, offsets, count, packed_values + at + begin * kColumns, padded * kColumns, nothing);
    numbers = numbers && whole;
  }
  // A tile multiplies values that a row must not see by zero, and zero times infinity is no number.
  if (!numbers) {
    for (i64 t = 0; t < tokens; ++t)
      decode_sequence(qkv + t * heads.row(), context, start + t + 1, window, heads, 0, num_kv_heads, scale * kLog2E,
                      out + t * num_heads * size, context, 0);
    return;
  }
  const i64 tiles = (tokens + kTileTokens - 1) / kTileTokens;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
  for (i64 unit = 0; unit < num_kv_heads * tiles; ++unit) {
    const i64 head = unit % num_kv_heads, begin = (tiles - 1 - unit / num_kv_heads) * kTileTokens, at = head * padded * size;
    prefill_tile(qkv, begin, std::min(begin + kTileTokens, tokens), start, window, head, heads, {packed_keys + at, packed_values + at, padded * kColumns},
                 scale * kLog2E, out);
  }
}

}  // extern "C"
