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
#include <lines.h>
#include <multiply.h>
#include <packing.h>
#include <scores.h>

#include <algorithm>

namespace {

// The tokens of a chunk that a row sees: from `first` on, before `end`.
struct Seen {
  i64 first, end;
  bool all(i64 count) const { return first <= 0 && end >= count; }
  __mmask16 lanes(i64 t) const { return first_lanes(end - t) & ~first_lanes(first - t); }
};

// The largest of one row's scores over a chunk, of those that it sees.
template <bool kAll>
inline float largest_score(const float* scores, i64 count, Seen seen) {
  __m512 top = _mm512_set1_ps(kMinusInfinity);
  for (i64 t = 0; t < count; t += kVector) {
    const __m512 here = _mm512_load_ps(scores + t);
    top = kAll ? _mm512_max_ps(top, here) : _mm512_mask_max_ps(top, seen.lanes(t), top, here);
  }
  return _mm512_reduce_max_ps(top);
}

// Scores of one row over a chunk become weights in bfloat16, relative to `largest`: zeros where it sees nothing. Returns their sum.
template <bool kAll>
inline float weigh_row(const float* scores, bf16* weights, i64 count, Seen seen, float scale, float largest) {
  const i64 begin = kAll ? 0 : std::clamp<i64>(seen.first, 0, count) / kLine * kLine;
  const i64 end = kAll ? count : std::clamp<i64>(seen.end, begin, count);
  for (i64 t = 0; t < begin; t += kLine) _mm512_store_si512(weights + t, _mm512_setzero_si512());
  __m512 sum = _mm512_setzero_ps();
  i64 t = begin;
  for (; t < end; t += kLine) {
    __m512 two[2];
    for (int i = 0; i < 2; ++i) {
      const i64 at = t + i * kVector;
      two[i] = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(scores + at), _mm512_set1_ps(scale), _mm512_set1_ps(largest)));
      if constexpr (!kAll) two[i] = _mm512_maskz_mov_ps(seen.lanes(at), two[i]);
      sum = _mm512_add_ps(sum, two[i]);
    }
    _mm512_store_si512(weights + t, (__m512i)_mm512_cvtne2ps_pbh(two[1], two[0]));
  }
  for (; t < count; t += kLine) _mm512_store_si512(weights + t, _mm512_setzero_si512());
  return _mm512_reduce_add_ps(sum);
}

// A chunk of one head's context, packed: keys of each 64 tokens, values of each 64 of H.
struct Packed {
  const bf16 *keys, *values;
  i64 stride;  // between the values of each 64 of H
};

// Rows of queries of `kSize` values that look at key/value heads, and what they have found so far.
template <i64 kSize>
struct Rows {
  Lines<bf16> queries, weights;
  Lines<float> scores, sums, largest, totals;

  void begin(i64 count) {
    queries.resize(count * kSize);
    weights.resize(count * kChunk);
    scores.resize(count * kChunk);
    sums.assign(count * kSize, 0.0f);
    largest.assign(count, kMinusInfinity);
    totals.assign(count, 0.0f);
  }

  // Rows from `first` on are those of a key/value head.
  void take(i64 first, const bf16* qkv, i64 tokens, i64 head, const Heads& heads) {
    for (i64 r = 0; r < tokens * heads.group(); ++r)
      std::memcpy(&queries[(first + r) * kSize], qkv + heads.query_at(head, r), kSize * sizeof(bf16));
  }

  // Write the attention of these rows.
  void put(i64 first, bf16* out, i64 tokens, i64 head, const Heads& heads) const {
    for (i64 r = 0; r < tokens * heads.group(); ++r) finish(first + r, out + heads.result_at(head, r));
  }

  // Let rows [first, last) look at the chunk's first `count` tokens, a multiple of 32, of which row r may see visible(r), but for
  // those that lie before its `window`. A row that sees nothing of a chunk stays as it is. Keys are packed up to a multiple of 64.
  template <typename Visible>
  void look(Multiplier& multiply, i64 first, i64 last, const Packed& chunk, i64 count, i64 window, float scale, const Visible& visible) {
    for (i64 t = 0; t < count; t += kColumns)
      multiply(&queries[first * kSize], kSize, last - first, chunk.keys + t * kSize, kSize / 2, &scores[first * kChunk + t], kChunk, false);
    weigh(first, last, count, window, scale, visible);
    add(multiply, first, last, 0, count, chunk.values, chunk.stride);
  }

  // Scores become weights, and what the rows have found so far becomes relative to the largest so far.
  template <typename Visible>
  void weigh(i64 first, i64 last, i64 count, i64 window, float scale, const Visible& visible) {
    Seen seen[kVector];
    for (i64 r = first; r < last; r += kVector) {
      const i64 rows = std::min(last - r, kVector);
      for (i64 i = 0; i < rows; ++i) seen[i] = {visible(r + i) - window, visible(r + i)};
      weigh_few(r, rows, count, seen, scale);
    }
  }

  // The same for up to 16 rows.
  void weigh_few(i64 first, i64 rows, i64 count, const Seen* seen, float scale) {
    alignas(64) float tops[kVector], shrinks[kVector];
    for (i64 r = 0; r < rows; ++r)
      tops[r] = (seen[r].all(count) ? largest_score<true> : largest_score<false>)(&scores[(first + r) * kChunk], count, seen[r]);
    const __mmask16 here = first_lanes(rows);
    const __m512 before = _mm512_maskz_loadu_ps(here, &largest[first]);
    const __m512 now = _mm512_max_ps(_mm512_mul_ps(_mm512_maskz_load_ps(here, tops), _mm512_set1_ps(scale)), before);
    const __mmask16 changed = _mm512_cmp_ps_mask(now, before, _CMP_NEQ_UQ);
    _mm512_mask_storeu_ps(&largest[first], here, now);
    _mm512_store_ps(shrinks, _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), changed, power_of_two(_mm512_sub_ps(before, now))));
    for (i64 r = 0; r < rows; ++r) {
      const i64 row = first + r;
      const auto weigh_one = seen[r].all(count) ? weigh_row<true> : weigh_row<false>;
      const float sum = weigh_one(&scores[row * kChunk], &weights[row * kChunk], count, seen[r], scale, largest[row]);
      totals[row] = totals[row] * shrinks[r] + sum;
      if (shrinks[r] != 1.0f)
        for (i64 h = 0; h < kSize; h += kVector) {
          float* at = &sums[row * kSize + h];
          _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), _mm512_set1_ps(shrinks[r])));
        }
    }
  }

  // Add `count` of a chunk's values, packed, those of token `begin` first, times their weights.
  template <typename Meanwhile = Nothing>
  void add(Multiplier& multiply, i64 first, i64 last, i64 begin, i64 count, const bf16* values, i64 stride, const Meanwhile& meanwhile = {}) {
    for (i64 h = 0; h < kSize; h += kColumns)
      multiply(&weights[first * kChunk + begin], kChunk, last - first, values + h / kColumns * stride, count / 2, &sums[first * kSize + h],
               kSize, true, meanwhile);
  }

  // Write a row's attention, in the order of H: pack_values has put every second four of each 32 into a register.
  void finish(i64 row, bf16* out) const {
    const __m512 inverse = _mm512_set1_ps(1.0f / totals[row]);
    for (i64 h = 0; h < kSize; h += kLine) {
      const __m512 even = _mm512_mul_ps(_mm512_load_ps(&sums[row * kSize + h]), inverse);
      const __m512 odd = _mm512_mul_ps(_mm512_load_ps(&sums[row * kSize + h + kVector]), inverse);
      const __m512 low = _mm512_shuffle_f32x4(even, odd, 0x44), high = _mm512_shuffle_f32x4(even, odd, 0xee);
      const __m512 first = _mm512_shuffle_f32x4(low, low, 0xd8), second = _mm512_shuffle_f32x4(high, high, 0xd8);
      _mm512_storeu_si512(out + h, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
  }
};

// The tokens of a chunk that is packed, if the context ends after `left` tokens.
inline i64 chunk_tokens(i64 left) { return std::min(kChunk, (left + kLine - 1) / kLine * kLine); }

// The last `tokens` tokens of a sequence, which may look together, and key/value heads [first, last). `qkv` and `out` are the rows of
// these tokens. `after` is the context that is likely to be wanted next.
template <i64 kSize>
void attend_few(Multiplier& multiply, const bf16* qkv, i64 tokens, const Context<bf16>& context, i64 length, i64 window, const Heads& heads,
                i64 first, i64 last, float scale, bf16* out, const Context<bf16>& after, i64 after_length) {
  static thread_local Rows<kSize> rows;
  static thread_local Scorer<kSize> scorer;
  static thread_local Room<bf16> buffer;
  const i64 group = heads.group(), each = tokens * group, width = (last - first) * kSize, count_rows = (last - first) * each;
  const auto row = [&](i64 head) { return (head - first) * each; };
  rows.begin(count_rows);
  for (i64 head = first; head < last; ++head) rows.take(row(head), qkv, tokens, head, heads);
  scorer.begin(rows.queries.data(), last - first, each);
  bf16* packed = buffer.of(kColumns * kSize);
  i64 offsets[kChunk];
  for (i64 begin = first_chunk(length - tokens + 1, window); begin < length; begin += kChunk) {
    const i64 left = length - begin, count = chunk_tokens(left);
    context.locate(begin, begin + std::min(left, kChunk), offsets);
    Ahead ahead;
    ahead.add(context, first * kSize, width, begin, length, after, after_length);
    for (i64 t = 0; t < count; t += kColumns)
      for (i64 head = first; head < last; ++head)
        scorer(multiply, head - first, context.of_head(head, kSize).keys, offsets + t, left - t, std::min(count - t, kColumns),
               &rows.scores[row(head) * kChunk + t], packed, ahead);
    rows.weigh(0, count_rows, count, window, scale, [&](i64 r) { return left - tokens + 1 + r % each / group; });
    for (i64 t = 0; t < count; t += kColumns)
      for (i64 head = first; head < last; ++head) {
        const i64 some = std::min(count - t, kColumns);
        pack_values<kSize, false>(context.of_head(head, kSize).values, offsets + t, left - t, some, packed, kColumns * kColumns, ahead);
        rows.add(multiply, row(head), row(head + 1), t, some, packed, kColumns * kColumns, [&] { ahead.bring<kBeside>(); });
      }
  }
  for (i64 head = first; head < last; ++head) rows.put(row(head), out, tokens, head, heads);
}

// Whether all values of tokens [begin, end) are numbers.
inline bool are_numbers(const Context<bf16>& context, i64 begin, i64 end) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  __mmask32 others = 0;
  context.blocks(begin, end, [&](i64 first, i64 tokens) {
    for (i64 i = 0; i < tokens * context.stride; i += kLine) {
      const __m512i line = _mm512_loadu_si512(context.values + first + i);
      others |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(line, exponent), exponent);
    }
  });
  return !others;
}

// How many of the last `tokens` tokens of a context may look at it together: all, unless a row would multiply something by zero, since
// it must not see it, that is no number. A row goes by what comes after it, and by a chunk that only rows before it see.
inline i64 may_look(const Context<bf16>& context, i64 length, i64 tokens, i64 window) {
  const i64 first = length - tokens + 1;
  const bool all = tokens < 2 || (are_numbers(context, first, length) &&
                                  are_numbers(context, first_chunk(first, window), first_chunk(length, window)));
  return all ? tokens : 1;
}

// Tokens [begin, end) of the new ones, all query heads of one key/value head, whose whole context is packed.
template <i64 kSize>
void prefill_tile(Multiplier& multiply, const bf16* qkv, i64 begin, i64 end, i64 start, i64 window, i64 head, const Heads& heads,
                  const Packed& context, float scale, bf16* out) {
  static thread_local Rows<kSize> rows;
  const i64 group = heads.group(), count_rows = (end - begin) * group, length = start + end;
  rows.begin(count_rows);
  rows.take(0, qkv + begin * heads.row(), end - begin, head, heads);
  for (i64 first = first_chunk(start + begin + 1, window); first < length; first += kChunk) {
    const Packed chunk{context.keys + first * kSize, context.values + first * kColumns, context.stride};
    const auto visible = [&](i64 r) { return start + begin + r / group + 1 - first; };
    rows.look(multiply, 0, count_rows, chunk, chunk_tokens(length - first), window, scale, visible);
  }
  rows.put(0, out + begin * heads.query * kSize, end - begin, head, heads);
}

template <i64 kSize>
void decode(const bf16* qkv, const bf16* keys, const bf16* values, const i64* tables, i64 table_width, const i64* lengths, const i64* ends,
            bf16* out, i64 sequences, const Heads& heads, i64 block_size, i64 window, float scale, i64 threads) {
  sequences = with_rows(ends, sequences);
  const i64 parts = head_parts(lengths, sequences, window, threads, heads.key_value), heads_each = heads.key_value / parts;
#pragma omp parallel num_threads(threads) if (threads > 1 && sequences * parts > 1)
  {
    Multiplier multiply;
#pragma omp for schedule(dynamic)
    for (i64 unit = 0; unit < sequences * parts; ++unit) {
      const i64 b = unit / parts, first = unit % parts * heads_each, after = std::min(b + threads, sequences - 1);
      const auto context = [&](i64 b) { return Context<bf16>{keys, values, tables + b * table_width, block_size, heads.key_value * kSize}; };
      const i64 begin = b == 0 ? 0 : ends[b - 1], together = may_look(context(b), lengths[b], ends[b] - begin, window);
      for (i64 row = begin; row < ends[b]; row += together)
        attend_few<kSize>(multiply, qkv + row * heads.row(), together, context(b), lengths[b] - ends[b] + row + together, window, heads,
                          first, first + heads_each, scale, out + row * heads.query * kSize, context(after),
                          after > b && parts == 1 && lengths[after] <= window ? lengths[after] : 0);
    }
  }
}

template <i64 kSize>
void prefill(const bf16* qkv, const bf16* keys, const bf16* values, const i64* table, bf16* out, i64 start, i64 tokens, const Heads& heads,
             i64 block_size, i64 window, float scale, i64 threads) {
  const i64 length = start + tokens;
  if (tokens * heads.group() <= kAsRead)
    return decode<kSize>(qkv, keys, values, table, 0, &length, &tokens, out, 1, heads, block_size, window, scale, threads);
  const Context<bf16> context{keys, values, table, block_size, heads.key_value * kSize};
  const i64 padded = (length + kColumns - 1) / kColumns * kColumns;
  const i64 hidden = first_chunk(start + 1, window), blocks = (padded - hidden) / kColumns;
  static thread_local Room<bf16> buffer;
  bf16 *packed_keys = buffer.of(2 * heads.key_value * padded * kSize), *packed_values = packed_keys + heads.key_value * padded * kSize;
  bool numbers = true;
#pragma omp parallel for num_threads(threads) reduction(&& : numbers) if (threads > 1)
  for (i64 unit = 0; unit < heads.key_value * blocks; ++unit) {
    const i64 head = unit / blocks, at = head * padded * kSize, begin = hidden + unit % blocks * kColumns;
    const i64 count = std::min(length - begin, kColumns);
    i64 offsets[kColumns];
    context.locate(begin, begin + count, offsets);
    Ahead nothing;
    const Context<bf16> here = context.of_head(head, kSize);
    pack_keys<kSize>(here.keys, offsets, count, packed_keys + at + begin * kSize, nothing);
    bf16* to = packed_values + at + begin * kColumns;
    const bool whole = pack_values<kSize, true>(here.values, offsets, count, kColumns, to, padded * kColumns, nothing);
    numbers = numbers && whole;
  }
  if (!numbers) {
    Multiplier multiply;
    for (i64 t = 0; t < tokens; ++t)
      attend_few<kSize>(multiply, qkv + t * heads.row(), 1, context, start + t + 1, window, heads, 0, heads.key_value, scale,
                        out + t * heads.query * kSize, context, 0);
    return;
  }
  const i64 tiles = (tokens + kTileTokens - 1) / kTileTokens;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Multiplier multiply;
#pragma omp for schedule(dynamic)
    for (i64 unit = 0; unit < heads.key_value * tiles; ++unit) {
      const i64 head = unit % heads.key_value, begin = (tiles - 1 - unit / heads.key_value) * kTileTokens, at = head * padded * kSize;
      prefill_tile<kSize>(multiply, qkv, begin, std::min(begin + kTileTokens, tokens), start, window, head, heads,
                          {packed_keys + at, packed_values + at, padded * kColumns}, scale, out);
    }
  }
}

}  // namespace

extern "C" {

// Rows [ends[b - 1], ends[b]) of qkv are the last ones of the lengths[b] tokens of sequence b, whose blocks are tables[b, :]. Each attends
// to itself and those before it, or to the last `window` of them. Sequences without rows come last. out: [rows, N, H].
void decode_attention(const bf16* qkv, const bf16* keys, const bf16* values, const i64* tables, i64 table_width, const i64* lengths,
                      const i64* ends, bf16* out, i64 sequences, i64 num_heads, i64 num_kv_heads, i64 size, i64 block_size, i64 window, float scale,
                      i64 threads) {
  const Heads heads{num_heads, num_kv_heads, size};
  (size == 64 ? decode<64> : decode<128>)(qkv, keys, values, tables, table_width, lengths, ends, out, sequences, heads, block_size,
                                          window, scale * kLog2E, threads);
}

// New tokens [start, start + tokens) of one sequence, already in the pool, attend to it causally. out: [T, N, H].
void prefill_attention(const bf16* qkv, const bf16* keys, const bf16* values, const i64* table, bf16* out, i64 start, i64 tokens,
                       i64 num_heads, i64 num_kv_heads, i64 size, i64 block_size, i64 window, float scale, i64 threads) {
  const Heads heads{num_heads, num_kv_heads, size};
  (size == 64 ? prefill<64> : prefill<128>)(qkv, keys, values, table, out, start, tokens, heads, block_size, window, scale * kLog2E, threads);
}

}  // extern "C"
