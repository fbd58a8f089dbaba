// Causal attention over a pool of keys and values in eight bits, which are multiplied as they lie there.
//
// A layer's pool is [slots, K, H + 2] bytes, once for keys and once for values: whole_numbers.h has what a head's bytes stand
// for. Queries, and the weights of a chunk times the scales of its values, are rounded to sixteen bits. Sums of whole numbers
// are exact, so their order does not matter. Everything else is as in attention.cpp.

#include "whole_numbers.h"
#include <context.h>
#include <lines.h>
#include <transpose.h>

#include <cmath>

namespace {

// A chunk of one head's context, packed: keys of each 64 tokens as [H / 4][64][4], values of each 64 of H as [tokens / 4][64][4],
// `stride` apart; and the scales of both.
struct Packed {
  byte *keys, *values;
  i64 stride;
  float *key_scales, *value_scales;

  // From token `first` on, a multiple of 64.
  Packed from(i64 first, i64 size) const {
    return {keys + first * size, values + first * kColumns, stride, key_scales + first, value_scales + first};
  }
};

// 64 bytes that are kept in a register: they are often on two lines, and compilers would read them again for each use.
inline __m512i load_once(const byte* from) {
  __m512i bytes = _mm512_loadu_si512(from);
  asm("" : "+v"(bytes));
  return bytes;
}

// The scales of up to 64 tokens of one head that lie at `offsets`, as numbers; those from `count` on are zero.
inline void copy_scales(const byte* heads, i64 size, const i64* offsets, i64 count, float* to) {
  alignas(64) bf16 scales[kColumns] = {};
  for (i64 t = 0, end = std::min(count, kColumns); t < end; ++t) std::memcpy(scales + t, heads + offsets[t] + size, kScale);
  for (i64 t = 0; t < kColumns; t += kVector) _mm512_store_ps(to + t, load(scales + t));
}

constexpr int kBeside = 4;  // lines that are brought near with each quad of a product with packed keys or values
alignas(64) constexpr byte kNothing[128] = {};

// Pack up to 64 tokens' keys of one head that lie at `offsets`; those from `count` on are zero. Brings a quarter as much near meanwhile:
// the rest is for the products with them.
inline void pack_keys(const byte* keys, i64 size, const i64* offsets, i64 count, byte* to, Ahead& ahead) {
  for (i64 t = 0; t < kColumns; t += kVector)
    for (i64 h = 0; h < size; h += 64) {
      __m512i quads[16];
      for (int i = 0; i < 16; ++i) quads[i] = load_once((t + i < count ? keys + offsets[t + i] : kNothing) + h);
      transpose(quads);
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + ((h / 4 + i) * kColumns + t) * 4, quads[i]);
      ahead.bring<kVector / 4>();
    }
}

// The same of values, those of each 64 of H `stride` apart.
inline void pack_values(const byte* values, i64 size, const i64* offsets, i64 count, byte* to, i64 stride, Ahead& ahead) {
  // In each quarter of a register, 16 values of H: their bytes of four tokens come to lie side by side, four of H to a register.
  for (i64 t = 0; t < kColumns; t += 4)
    for (i64 h = 0; h < size; h += 64) {
      __m512i four[4];
      for (int i = 0; i < 4; ++i) four[i] = load_once((t + i < count ? values + offsets[t + i] : kNothing) + h);
      const __m512i a = _mm512_unpacklo_epi8(four[0], four[1]), b = _mm512_unpackhi_epi8(four[0], four[1]);
      const __m512i c = _mm512_unpacklo_epi8(four[2], four[3]), d = _mm512_unpackhi_epi8(four[2], four[3]);
      byte* at = to + h / 64 * stride + t * kColumns;
      _mm512_storeu_si512(at, _mm512_unpacklo_epi16(a, c));
      _mm512_storeu_si512(at + 64, _mm512_unpackhi_epi16(a, c));
      _mm512_storeu_si512(at + 128, _mm512_unpacklo_epi16(b, d));
      _mm512_storeu_si512(at + 192, _mm512_unpackhi_epi16(b, d));
      ahead.bring<1>();
    }
}

// Products of one row with a chunk's keys become weights times the scales of the values, rounded, as two rows of bytes. Where
// kMasked, only the first `visible` keys count, but for the first `hidden` of them. Returns what the row's sums so far are to be
// multiplied by.
template <bool kMasked>
inline float weigh_row(const int32_t* products, int8_t* planes, i64 length, i64 visible, i64 hidden, const float* key_scales,
                       const float* value_scales, const WholeRow& query, WholeRow& weights, float& largest, float& total) {
  alignas(64) float scores[kChunk];
  const auto lanes = [&](i64 t) -> __mmask16 { return kMasked ? first_lanes(visible - t) & ~first_lanes(hidden - t) : 0xffff; };
  __m512 top = _mm512_set1_ps(kMinusInfinity);
  for (i64 t = 0; t < length; t += kVector) {
    const __m512 product = _mm512_mul_ps(query.product(products + t, products + kChunk + t), _mm512_set1_ps(query.scale));
    const __m512 score = _mm512_mul_ps(product, _mm512_loadu_ps(key_scales + t));
    top = _mm512_mask_max_ps(top, lanes(t), top, score);
    _mm512_store_ps(scores + t, score);
  }
  const float now = std::max(largest, _mm512_reduce_max_ps(top));
  __m512 sum = _mm512_setzero_ps(), most = _mm512_setzero_ps();
  __mmask16 no_numbers = 0;
  for (i64 t = 0; t < length; t += kVector) {
    const __m512 weight = _mm512_maskz_mov_ps(lanes(t), power_of_two(_mm512_sub_ps(_mm512_load_ps(scores + t), _mm512_set1_ps(now))));
    const __m512 scaled = _mm512_maskz_mul_ps(lanes(t), weight, _mm512_loadu_ps(value_scales + t));
    sum = _mm512_add_ps(sum, weight);
    most = _mm512_max_ps(most, scaled);
    no_numbers |= _mm512_cmp_ps_mask(scaled, scaled, _CMP_UNORD_Q);
    _mm512_store_ps(scores + t, scaled);
  }
  const float most_scaled = no_numbers ? std::numeric_limits<float>::quiet_NaN() : _mm512_reduce_max_ps(most);
  const __m512 inverse = _mm512_set1_ps(most_scaled >= kLeast ? kWhole / most_scaled : 0.0f);
  __m512i whole_sum = _mm512_setzero_si512();
  for (i64 t = 0; t < length; t += kVector) {
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(scores + t), inverse));
    store_planes(whole, planes + t, planes + kChunk + t);
    whole_sum = _mm512_add_epi32(whole_sum, whole);
  }
  weights = {most_scaled < kLeast ? 0.0f : most_scaled / kWhole, shift_of(whole_sum)};
  const float shrink = now == largest ? 1.0f : std::exp2(largest - now);
  total = total * shrink + _mm512_reduce_add_ps(sum);
  largest = now;
  return shrink;
}

// Rows of queries that look at key/value heads, and what they have found so far. Queries, weights and products have two rows of
// bytes each, or of products with them.
struct Rows {
  Lines<int8_t> queries, weights;
  Lines<int32_t> products, found;
  Lines<WholeRow> whole_queries, whole_weights;
  Lines<float> sums, largest, totals, shrinks;

  void begin(i64 count, i64 size) {
    queries.resize(2 * count * size);
    weights.resize(2 * count * kChunk);
    products.resize(2 * count * kChunk);
    found.resize(2 * count * size);
    whole_queries.resize(count);
    whole_weights.resize(count);
    shrinks.resize(count);
    sums.assign(count * size, 0.0f);
    largest.assign(count, kMinusInfinity);
    totals.assign(count, 0.0f);
  }

  // Rows from `first` on are those of a key/value head. Products with them are multiplied by `scale`, too.
  void take(i64 first, const bf16* qkv, i64 tokens, i64 head, const Heads& heads, float scale) {
    for (i64 r = 0, size = heads.size; r < tokens * heads.group(); ++r) {
      int8_t* planes = &queries[2 * (first + r) * size];
      WholeRow& query = whole_queries[first + r];
      query = as_planes(qkv + heads.query_at(head, r), size, planes, planes + size);
      query.scale *= scale;
    }
  }

  // Write the attention of these rows.
  void put(i64 first, bf16* out, i64 tokens, i64 head, const Heads& heads) const {
    for (i64 r = 0; r < tokens * heads.group(); ++r) finish(first + r, heads.size, out + heads.result_at(head, r));
  }

  // Let rows [first, last) look at the chunk's first `count` tokens, a multiple of 64, of which row r may see visible(r), but for
  // those that lie before its `window`. A row that sees nothing of a chunk stays as it is.
  template <typename Visible>
  void look(i64 first, i64 last, i64 size, const Packed& chunk, i64 count, i64 window, const Visible& visible) {
    for (i64 t = 0; t < count; t += kColumns) score(first, last, size, chunk.keys + t * size, t);
    weigh(first, last, count, window, chunk.key_scales, chunk.value_scales, visible);
    add(first, last, size, chunk.values, chunk.stride, 0, count);
    gather(first, last, size);
  }

  // Multiply with 64 keys, packed, of which the first is token `t` of a chunk.
  template <typename Meanwhile = Nothing>
  void score(i64 first, i64 last, i64 size, const byte* keys, i64 t, const Meanwhile& meanwhile = {}) {
    multiply_whole(&queries[2 * first * size], size, 2 * (last - first), keys, size / 4, &products[2 * first * kChunk + t], kChunk, false,
                   meanwhile);
  }

  // Products with a chunk's keys become weights.
  template <typename Visible>
  void weigh(i64 first, i64 last, i64 count, i64 window, const float* key_scales, const float* value_scales, const Visible& visible) {
    for (i64 r = first; r < last; ++r) {
      const i64 hidden = visible(r) - window;
      const auto weigh = visible(r) < count || hidden > 0 ? weigh_row<true> : weigh_row<false>;
      shrinks[r] = weigh(&products[2 * r * kChunk], &weights[2 * r * kChunk], count, visible(r), hidden, key_scales, value_scales,
                         whole_queries[r], whole_weights[r], largest[r], totals[r]);
    }
  }

  // Multiply weights with `count` values, packed, of which the first is token `t` of a chunk.
  template <typename Meanwhile = Nothing>
  void add(i64 first, i64 last, i64 size, const byte* values, i64 stride, i64 t, i64 count, const Meanwhile& meanwhile = {}) {
    for (i64 h = 0; h < size; h += kColumns)
      multiply_whole(&weights[2 * first * kChunk + t], kChunk, 2 * (last - first), values + h / 64 * stride, count / 4,
                     &found[2 * first * size + h], size, t > 0, meanwhile);
  }

  // What was found in a chunk joins what was found before.
  void gather(i64 first, i64 last, i64 size) {
    for (i64 r = first; r < last; ++r) {
      const __m512 shrink = _mm512_set1_ps(shrinks[r]), scale = _mm512_set1_ps(whole_weights[r].scale);
      for (i64 h = 0; h < size; h += kVector) {
        const __m512 more = whole_weights[r].product(&found[2 * r * size + h], &found[(2 * r + 1) * size + h]);
        float* at = &sums[r * size + h];
        _mm512_storeu_ps(at, _mm512_fmadd_ps(more, scale, _mm512_mul_ps(_mm512_loadu_ps(at), shrink)));
      }
    }
  }

  // Write a row's attention, in the order of H: pack_values has put every fourth four of each 64 into a register.
  void finish(i64 row, i64 size, bf16* out) const {
    const __m512 total = _mm512_set1_ps(totals[row]);
    for (i64 h = 0; h < size; h += 64) {
      __m512 s[4];
      for (int i = 0; i < 4; ++i) s[i] = _mm512_div_ps(_mm512_loadu_ps(&sums[row * size + h + i * kVector]), total);
      const __m512 a = _mm512_shuffle_f32x4(s[0], s[1], 0x44), b = _mm512_shuffle_f32x4(s[2], s[3], 0x44);
      const __m512 c = _mm512_shuffle_f32x4(s[0], s[1], 0xee), d = _mm512_shuffle_f32x4(s[2], s[3], 0xee);
      store(out + h, _mm512_shuffle_f32x4(a, b, 0x88));
      store(out + h + 16, _mm512_shuffle_f32x4(a, b, 0xdd));
      store(out + h + 32, _mm512_shuffle_f32x4(c, d, 0x88));
      store(out + h + 48, _mm512_shuffle_f32x4(c, d, 0xdd));
    }
  }
};

// The tokens of a chunk that is packed, if the context ends after `left` tokens.
inline i64 chunk_tokens(i64 left) { return std::min(kChunk, (left + kColumns - 1) / kColumns * kColumns); }

// The last `tokens` tokens of a sequence, key/value heads [first, last). `qkv` and `out` are the rows of these tokens. `after` is the
// context that is likely to be wanted next.
void attend_few(const bf16* qkv, i64 tokens, const Context<byte>& context, i64 length, i64 window, const Heads& heads, i64 first, i64 last,
                float scale, bf16* out, const Context<byte>& after, i64 after_length) {
  static thread_local Rows rows;
  static thread_local Room<byte> buffer;
  static thread_local Lines<float> scales;
  const i64 group = heads.group(), size = heads.size, width = size + kScale, each = tokens * group, count_rows = (last - first) * each;
  const bool is_whole = last - first == heads.key_value;
  const auto row = [&](i64 head) { return (head - first) * each; };
  rows.begin(count_rows, size);
  for (i64 head = first; head < last; ++head) rows.take(row(head), qkv, tokens, head, heads, scale);
  scales.resize(2 * (last - first) * kChunk);
  const auto key_scales = [&](i64 head) { return &scales[2 * (head - first) * kChunk]; };
  const auto value_scales = [&](i64 head) { return key_scales(head) + kChunk; };
  byte* const packed = buffer.of(kColumns * size);
  i64 offsets[kChunk];
  for (i64 begin = first_chunk(length - tokens + 1, window); begin < length; begin += kChunk) {
    const i64 left = length - begin, count = chunk_tokens(left);
    context.locate(begin, begin + std::min(left, kChunk), offsets);
    Ahead ahead;
    ahead.add(context, first * width, (last - first) * width, begin, length, after, after_length);
    const auto bring = [&] {
      ahead.bring<kBeside>();
      if (!is_whole) ahead.bring<kBeside>();  // each head's bytes lie on a line more
    };
    for (i64 t = 0; t < count; t += kColumns)
      for (i64 head = first; head < last; ++head) {
        const byte* keys = context.keys + head * width;
        copy_scales(keys, size, offsets + t, left - t, key_scales(head) + t);
        pack_keys(keys, size, offsets + t, left - t, packed, ahead);
        rows.score(row(head), row(head + 1), size, packed, t, bring);
      }
    for (i64 head = first; head < last; ++head) {
      for (i64 t = 0; t < count; t += kColumns)
        copy_scales(context.values + head * width, size, offsets + t, left - t, value_scales(head) + t);
      rows.weigh(row(head), row(head + 1), count, window, key_scales(head), value_scales(head),
                 [&](i64 r) { return left - tokens + 1 + r % each / group; });
    }
    for (i64 t = 0; t < count; t += kColumns)
      for (i64 head = first; head < last; ++head) {
        pack_values(context.values + head * width, size, offsets + t, left - t, packed, kColumns * kColumns, ahead);
        rows.add(row(head), row(head + 1), size, packed, kColumns * kColumns, t, kColumns, bring);
      }
    rows.gather(0, count_rows, size);
  }
  for (i64 head = first; head < last; ++head) rows.put(row(head), out, tokens, head, heads);
}

// Tokens [begin, end) of the new ones, all query heads of one key/value head, whose whole context is packed.
void prefill_tile(const bf16* qkv, i64 begin, i64 end, i64 start, i64 window, i64 head, const Heads& heads, const Packed& context,
                  float scale, bf16* out) {
  static thread_local Rows rows;
  const i64 group = heads.group(), size = heads.size, count_rows = (end - begin) * group, length = start + end;
  rows.begin(count_rows, size);
  rows.take(0, qkv + begin * heads.row(), end - begin, head, heads, scale);
  for (i64 first = first_chunk(start + begin + 1, window); first < length; first += kChunk) {
    const auto visible = [&](i64 r) { return start + begin + r / group + 1 - first; };
    rows.look(0, count_rows, size, context.from(first, size), chunk_tokens(length - first), window, visible);
  }
  rows.put(0, out + begin * heads.query * size, end - begin, head, heads);
}

}  // namespace

extern "C" {

// Rows [ends[b - 1], ends[b]) of qkv are the last ones of the lengths[b] tokens of sequence b, whose blocks are tables[b, :]. Each attends
// to itself and those before it, or to the last `window` of them. Sequences without rows come last. out: [rows, N, H].
void decode_attention_int8(const bf16* qkv, const byte* keys, const byte* values, const i64* tables, i64 table_width, const i64* lengths,
                           const i64* ends, bf16* out, i64 sequences, i64 num_heads, i64 num_kv_heads, i64 size, i64 block_size, i64 window, float scale,
                           i64 threads) {
  const Heads heads{num_heads, num_kv_heads, size};
  sequences = with_rows(ends, sequences);
  const i64 parts = head_parts(lengths, sequences, window, threads, num_kv_heads), heads_each = num_kv_heads / parts, stride = num_kv_heads * (size + kScale);
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && sequences * parts > 1)
  for (i64 unit = 0; unit < sequences * parts; ++unit) {
    const i64 b = unit / parts, first = unit % parts * heads_each, after = std::min(b + threads, sequences - 1);
    const auto context = [&](i64 b) { return Context<byte>{keys, values, tables + b * table_width, block_size, stride}; };
    const i64 row = b == 0 ? 0 : ends[b - 1];
    attend_few(qkv + row * heads.row(), ends[b] - row, context(b), lengths[b], window, heads, first, first + heads_each, scale * kLog2E,
               out + row * num_heads * size, context(after), after > b && parts == 1 && lengths[after] <= window ? lengths[after] : 0);
  }
}

// New tokens [start, start + tokens) of one sequence, already in the pool, attend to it causally. out: [T, N, H].
void prefill_attention_int8(const bf16* qkv, const byte* keys, const byte* values, const i64* table, bf16* out, i64 start, i64 tokens,
                            i64 num_heads, i64 num_kv_heads, i64 size, i64 block_size, i64 window, float scale,
                           i64 threads) {
  const Heads heads{num_heads, num_kv_heads, size};
  const i64 length = start + tokens;
  if (tokens * heads.group() <= kAsRead)
    return decode_attention_int8(qkv, keys, values, table, 0, &length, &tokens, out, 1, num_heads, num_kv_heads, size, block_size, window,
                                 scale, threads);
  const Context<byte> context{keys, values, table, block_size, num_kv_heads * (size + kScale)};
  const i64 padded = (length + kColumns - 1) / kColumns * kColumns;
  const i64 hidden = first_chunk(start + 1, window), blocks = (padded - hidden) / kColumns;
  static thread_local Room<byte> buffer;
  static thread_local Room<float> scales;
  byte* const bytes = buffer.of(2 * num_kv_heads * padded * size);  // of this thread: the others must not look for their own
  float* const floats = scales.of(2 * num_kv_heads * padded);
  const auto packed = [=](i64 head) {
    byte* keys = bytes + 2 * head * padded * size;
    float* key_scales = floats + 2 * head * padded;
    return Packed{keys, keys + padded * size, padded * kColumns, key_scales, key_scales + padded};
  };
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (i64 unit = 0; unit < num_kv_heads * blocks; ++unit) {
    const i64 head = unit / blocks, begin = hidden + unit % blocks * kColumns, count = std::min(length - begin, kColumns);
    i64 offsets[kColumns];
    context.locate(begin, begin + count, offsets);
    Ahead nothing;
    const Context<byte> here = context.of_head(head, size + kScale);
    const Packed to = packed(head).from(begin, size);
    copy_scales(here.keys, size, offsets, count, to.key_scales);
    copy_scales(here.values, size, offsets, count, to.value_scales);
    pack_keys(here.keys, size, offsets, count, to.keys, nothing);
    pack_values(here.values, size, offsets, count, to.values, to.stride, nothing);
  }
  const i64 tiles = (tokens + kTileTokens - 1) / kTileTokens;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
  for (i64 unit = 0; unit < num_kv_heads * tiles; ++unit) {
    const i64 head = unit % num_kv_heads, begin = (tiles - 1 - unit / num_kv_heads) * kTileTokens;
    prefill_tile(qkv, begin, std::min(begin + kTileTokens, tokens), start, window, head, heads, packed(head), scale * kLog2E, out);
  }
}

}  // extern "C"
