// Causal attention over the paged pool, without scores or contexts ever lying in memory as a whole.
//
// N query heads, K key/value heads, G = N / K, H head size: 64 or 128. `qkv` rows hold N + 2 K heads. A layer's pool is
// [slots, K, H], once for keys and once for values; token t of a sequence lies in slot
// table[t / block_size] * block_size + t % block_size.
//
// Scores are logarithms to the base of two. Both kinds read the context in chunks of fixed places and keep a running
// maximum and total, as in Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, and Dao et al.,
// "FlashAttention", 2022.

#include "common.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// The sums of sixteen registers, in order.
inline __m512 sums(const __m512 v[16]) {
  __m512 quads[4];
  for (int i = 0; i < 4; ++i) {
    const __m512 *q = v + 4 * i;
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(q[0], q[1]), _mm512_unpackhi_ps(q[0], q[1]));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(q[2], q[3]), _mm512_unpackhi_ps(q[2], q[3]));
    const __m512d a = _mm512_castps_pd(ab), c = _mm512_castps_pd(cd);
    quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, c)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, c)));
  }
  const __m512 u = _mm512_add_ps(_mm512_shuffle_f32x4(quads[0], quads[1], 0x88), _mm512_shuffle_f32x4(quads[0], quads[1], 0xdd));
  const __m512 w = _mm512_add_ps(_mm512_shuffle_f32x4(quads[2], quads[3], 0x88), _mm512_shuffle_f32x4(quads[2], quads[3], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(u, w, 0x88), _mm512_shuffle_f32x4(u, w, 0xdd));
}

struct Heads {
  i64 query, key_value, size;
  i64 group() const { return query / key_value; }
  i64 row() const { return (query + 2 * key_value) * size; }
};

struct Context {
  const bf16 *keys, *values;
  const i64* table;
  i64 block_size, stride;  // stride between tokens, K * H

  Context of_head(i64 head, i64 size) const {
    return {keys + head * size, values + head * size, table, block_size, stride};
  }

  // Where tokens [begin, begin + count) lie; beyond `length`, where the last one does.
  void locate(i64 begin, i64 length, i64 count, i64* offsets) const {
    const i64* block = table + begin / block_size;
    i64 within = begin % block_size;
    for (i64 t = 0; t < count; ++t) {
      offsets[t] = (*block * block_size + within) * stride;
      if (begin + t + 1 < length && ++within == block_size) {
        within = 0;
        ++block;
      }
    }
  }
};

// Take a chunk, its largest score and its weights' sum, into the running ones. Returns what earlier sums are multiplied by.
inline float fold(float now, __m512 sum, float& largest, float& total) {
  const float shrink = now == largest ? 1.0f : std::exp2(largest - now);
  total = total * shrink + _mm512_reduce_add_ps(sum);
  largest = now;
  return shrink;
}

// ---- decode: one new token per sequence ---------------------------------------------------------------------------

constexpr i64 kDecodeChunk = 128;

// Scores of one query head with `count` tokens, whose keys are at `offsets`; the rest of the chunk is minus infinity.
template <int HZ>
void score_chunk(const bf16* q, const bf16* keys, const i64* offsets, i64 count, float scale, float* scores) {
  __m512bh query[HZ];
  for (int z = 0; z < HZ; ++z) query[z] = load_pairs(q + 32 * z);
  for (i64 t = 0; t < kDecodeChunk; t += kVector) {
    if (t >= count) {
      _mm512_storeu_ps(scores + t, _mm512_set1_ps(kMinusInfinity));
      continue;
    }
    __m512 products[16];
    for (int i = 0; i < 16; ++i) {
      const bf16* key = keys + offsets[t + i];
      products[i] = _mm512_dpbf16_ps(_mm512_setzero_ps(), query[0], load_pairs(key));
      for (int z = 1; z < HZ; ++z) products[i] = _mm512_dpbf16_ps(products[i], query[z], load_pairs(key + 32 * z));
    }
    const __m512 scaled = _mm512_mul_ps(sums(products), _mm512_set1_ps(scale));
    _mm512_storeu_ps(scores + t, _mm512_mask_mov_ps(_mm512_set1_ps(kMinusInfinity), first_lanes(count - t), scaled));
  }
}

// Scores become weights relative to the largest score so far. Returns what the sums so far are to be multiplied by.
inline float weigh_chunk(float* scores, i64 length, float& largest, float& total) {
  __m512 top = _mm512_loadu_ps(scores);
  for (i64 t = kVector; t < length; t += kVector) top = _mm512_max_ps(top, _mm512_loadu_ps(scores + t));
  const float now = std::max(largest, _mm512_reduce_max_ps(top));
  __m512 sum = _mm512_setzero_ps();
  for (i64 t = 0; t < length; t += kVector) {
    const __m512 weight = power_of_two(_mm512_sub_ps(_mm512_loadu_ps(scores + t), _mm512_set1_ps(now)));
    _mm512_storeu_ps(scores + t, weight);
    sum = _mm512_add_ps(sum, weight);
  }
  return fold(now, sum, largest, total);
}

// Add up the values at `offsets`, and have those keys and values brought near that are wanted next. Blocks lie anywhere, so
// the processor can't guess where, and it takes only so many requests at a time: a few with each token, not all at once.
template <int GT, int HZ>
void add_values(const float (*weights)[kDecodeChunk], const float* shrink, const Context& context, const i64* offsets,
                const i64* next_offsets, i64 count, float* out) {
  constexpr int Z = 2 * HZ;
  __m512 acc[GT][Z];
  for (int g = 0; g < GT; ++g)
    for (int z = 0; z < Z; ++z) acc[g][z] = _mm512_mul_ps(_mm512_loadu_ps(out + (g * Z + z) * kVector), _mm512_set1_ps(shrink[g]));
  for (i64 t = 0; t < count; ++t) {
    for (int z = 0; z < HZ; ++z) {
      _mm_prefetch(reinterpret_cast<const char*>(context.keys + next_offsets[t] + 32 * z), _MM_HINT_T1);
      _mm_prefetch(reinterpret_cast<const char*>(context.values + next_offsets[t] + 32 * z), _MM_HINT_T1);
    }
    __m512 value[Z];
    for (int z = 0; z < Z; ++z) value[z] = load(context.values + offsets[t] + z * kVector);
    for (int g = 0; g < GT; ++g)
      for (int z = 0; z < Z; ++z) acc[g][z] = _mm512_fmadd_ps(value[z], _mm512_set1_ps(weights[g][t]), acc[g][z]);
  }
  for (int g = 0; g < GT; ++g)
    for (int z = 0; z < Z; ++z) _mm512_storeu_ps(out + (g * Z + z) * kVector, acc[g][z]);
}

// One sequence, key/value heads [first, last). `q` and `out` are rows of all query heads.
template <int HZ>
void decode_sequence(const bf16* q, const Context& context, i64 length, const Heads& heads, i64 first, i64 last, float scale, bf16* out) {
  constexpr int kTile = HZ == 2 ? 4 : 2;  // query heads whose sums fit into the registers
  const i64 group = heads.group(), size = heads.size, count_heads = (last - first) * group;
  static thread_local std::vector<float> state;
  state.assign(count_heads * (size + 2), 0.0f);
  float *acc = state.data(), *largest = acc + count_heads * size, *total = largest + count_heads;
  std::fill(largest, total, kMinusInfinity);
  i64 places[2][kDecodeChunk], *offsets = places[0], *next_offsets = places[1];
  context.locate(0, length, kDecodeChunk, offsets);
  for (i64 begin = 0; begin < length; begin += kDecodeChunk, std::swap(offsets, next_offsets)) {
    const i64 count = std::min(kDecodeChunk, length - begin), next = begin + kDecodeChunk;
    if (next < length) context.locate(next, length, kDecodeChunk, next_offsets);
    else next_offsets = offsets;
    for (i64 head = first; head < last; ++head) {
      const Context own = context.of_head(head, size);
      for (i64 g = 0; g < group; g += kTile) {
        const i64 tile = std::min<i64>(kTile, group - g), state_row = (head - first) * group + g;
        alignas(64) float weights[kTile][kDecodeChunk];
        float shrink[kTile];
        for (i64 i = 0; i < tile; ++i) {
          score_chunk<HZ>(q + (head * group + g + i) * size, own.keys, offsets, count, scale, weights[i]);
          shrink[i] = weigh_chunk(weights[i], kDecodeChunk, largest[state_row + i], total[state_row + i]);
        }
        float* sums = acc + state_row * size;
        switch (tile) {
          case 1: add_values<1, HZ>(weights, shrink, own, offsets, next_offsets, count, sums); break;
          case 2: add_values<2, HZ>(weights, shrink, own, offsets, next_offsets, count, sums); break;
          case 3: if constexpr (kTile > 2) add_values<3, HZ>(weights, shrink, own, offsets, next_offsets, count, sums); break;
          case 4: if constexpr (kTile > 2) add_values<4, HZ>(weights, shrink, own, offsets, next_offsets, count, sums); break;
        }
      }
    }
  }
  for (i64 i = 0; i < count_heads; ++i)
    for (i64 z = 0; z < size; z += kVector)
      store(out + (first * group + i) * size + z, _mm512_div_ps(_mm512_loadu_ps(acc + i * size + z), _mm512_set1_ps(total[i])));
}

// ---- prefill: several new tokens of one sequence --------------------------------------------------------------------

constexpr i64 kPrefillChunk = 128;  // keys whose scores are held at once
constexpr i64 kTileTokens = 16;

// Rows of sixteen pairs become columns.
inline void transpose(__m512i v[16]) {
  __m512i lanes[16];  // [4 q + j]: in each lane, pair j of it of the rows 4 q to 4 q + 3
  for (int i = 0; i < 16; i += 4) {
    const __m512i a = _mm512_unpacklo_epi32(v[i], v[i + 1]), b = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    const __m512i c = _mm512_unpacklo_epi32(v[i + 2], v[i + 3]), d = _mm512_unpackhi_epi32(v[i + 2], v[i + 3]);
    lanes[i] = _mm512_unpacklo_epi64(a, c);
    lanes[i + 1] = _mm512_unpackhi_epi64(a, c);
    lanes[i + 2] = _mm512_unpacklo_epi64(b, d);
    lanes[i + 3] = _mm512_unpackhi_epi64(b, d);
  }
  for (int j = 0; j < 4; ++j) {
    const __m512i a = _mm512_shuffle_i32x4(lanes[j], lanes[4 + j], 0x88), b = _mm512_shuffle_i32x4(lanes[j], lanes[4 + j], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(lanes[8 + j], lanes[12 + j], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(lanes[8 + j], lanes[12 + j], 0xdd);
    v[j] = _mm512_shuffle_i32x4(a, c, 0x88);
    v[4 + j] = _mm512_shuffle_i32x4(b, d, 0x88);
    v[8 + j] = _mm512_shuffle_i32x4(a, c, 0xdd);
    v[12 + j] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
}

// Keys of one head as [L / 64][H / 2][64][2], values as [H / 64][L / 2][64][2]; tokens beyond `length` are zero.
void pack_block(const Context& context, i64 size, i64 begin, i64 length, i64 padded, bf16* keys, bf16* values) {
  i64 offsets[kColumns];
  context.locate(begin, length, kColumns, offsets);
  bf16* packed_keys = keys + begin * size;
  for (i64 t = 0; t < kColumns; t += kVector)
    for (i64 p = 0; p < size / 2; p += kVector) {
      __m512i pairs[16];
      for (int i = 0; i < 16; ++i) {
        const bool real = begin + t + i < length;
        pairs[i] = real ? _mm512_loadu_si512(context.keys + offsets[t + i] + 2 * p) : _mm512_setzero_si512();
      }
      transpose(pairs);
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(packed_keys + ((p + i) * kColumns + t) * 2, pairs[i]);
    }
  const auto widened = [&](i64 t, i64 h) {
    if (begin + t >= length) return _mm512_setzero_si512();
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(context.values + offsets[t] + h)));
  };
  for (i64 t = 0; t < kColumns; t += 2)
    for (i64 h = 0; h < size; h += kVector) {
      const __m512i pairs = _mm512_or_si512(widened(t, h), _mm512_slli_epi32(widened(t + 1, h), 16));
      bf16* block = values + h / kColumns * padded * kColumns;
      _mm512_storeu_si512(block + ((begin + t) / 2 * kColumns + h % kColumns) * 2, pairs);
    }
}

// Scores of one row over a chunk become weights in bfloat16. Where kMasked, only the first `visible` keys count.
template <bool kMasked>
inline float weigh_row(const float* scores, bf16* weights, i64 length, i64 visible, float scale, float& largest, float& total) {
  const auto lanes = [&](i64 t) { return kMasked ? first_lanes(visible - t) : static_cast<__mmask16>(0xffff); };
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
  return fold(now, sum, largest, total);
}

struct Workspace {
  std::vector<bf16> queries, weights;
  std::vector<float> scores, acc, largest, total;
};

// Tokens [begin, end) of the new ones, all query heads of one key/value head.
void prefill_tile(const bf16* qkv, i64 begin, i64 end, i64 start, i64 head, const Heads& heads, const bf16* keys, const bf16* values,
                  i64 padded, float scale, bf16* out) {
  static thread_local Workspace work;
  const i64 group = heads.group(), size = heads.size, rows = (end - begin) * group;
  work.queries.resize(rows * size);
  work.weights.resize(rows * kPrefillChunk);
  work.scores.resize(rows * kPrefillChunk);
  work.acc.assign(rows * size, 0.0f);
  work.largest.assign(rows, kMinusInfinity);
  work.total.assign(rows, 0.0f);
  for (i64 r = 0; r < rows; ++r)
    std::memcpy(&work.queries[r * size], qkv + (begin + r / group) * heads.row() + (head * group + r % group) * size, size * sizeof(bf16));
  const i64 length = start + end;
  for (i64 first = 0; first < length; first += kPrefillChunk) {
    const i64 count = std::min(kPrefillChunk, (length - first + kColumns - 1) / kColumns * kColumns);
    for (i64 t = 0; t < count; t += kColumns)
      multiply_dense(work.queries.data(), size, rows, keys + (first + t) * size, size / 2, &work.scores[t], kPrefillChunk, false);
    for (i64 r = 0; r < rows; ++r) {
      const i64 visible = start + begin + r / group + 1 - first;
      const auto weigh = visible < count ? weigh_row<true> : weigh_row<false>;
      const float shrink = weigh(&work.scores[r * kPrefillChunk], &work.weights[r * kPrefillChunk], count, visible, scale,
                                 work.largest[r], work.total[r]);
      if (shrink != 1.0f)
        for (i64 z = 0; z < size; z += kVector) {
          float* at = &work.acc[r * size + z];
          _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), _mm512_set1_ps(shrink)));
        }
    }
    for (i64 h = 0; h < size; h += kColumns)
      multiply_dense(work.weights.data(), kPrefillChunk, rows, values + (h / kColumns) * padded * kColumns + first * kColumns, count / 2,
               &work.acc[h], size, true);
  }
  for (i64 r = 0; r < rows; ++r)
    for (i64 z = 0; z < size; z += kVector)
      store(out + (begin + r / group) * heads.query * size + (head * group + r % group) * size + z,
            _mm512_div_ps(_mm512_loadu_ps(&work.acc[r * size + z]), _mm512_set1_ps(work.total[r])));
}

}  // namespace

extern "C" {

// Row b of qkv attends to the first lengths[b] tokens of its sequence, whose blocks are tables[b, :]. out: [B, N, H].
void decode_attention(const bf16* qkv, const bf16* keys, const bf16* values, const i64* tables, i64 table_width, const i64* lengths,
                      bf16* out, i64 sequences, i64 num_heads, i64 num_kv_heads, i64 size, i64 block_size, float scale, i64 threads) {
  const Heads heads{num_heads, num_kv_heads, size};
  const i64 parts = sequences >= threads ? 1 : num_kv_heads, heads_each = num_kv_heads / parts;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && sequences * parts > 1)
  for (i64 unit = 0; unit < sequences * parts; ++unit) {
    const i64 b = unit / parts, first = unit % parts * heads_each;
    const Context context{keys, values, tables + b * table_width, block_size, num_kv_heads * size};
    const auto run = size == 64 ? decode_sequence<2> : decode_sequence<4>;
    run(qkv + b * heads.row(), context, lengths[b], heads, first, first + heads_each, scale * kLog2E, out + b * num_heads * size);
  }
}

// New tokens [start, start + tokens) of one sequence, already in the pool, attend to it causally. out: [T, N, H].
void prefill_attention(const bf16* qkv, const bf16* keys, const bf16* values, const i64* table, bf16* out, i64 start, i64 tokens,
                       i64 num_heads, i64 num_kv_heads, i64 size, i64 block_size, float scale, i64 threads) {
  const Heads heads{num_heads, num_kv_heads, size};
  const Context context{keys, values, table, block_size, num_kv_heads * size};
  const i64 length = start + tokens, padded = (length + kColumns - 1) / kColumns * kColumns, blocks = padded / kColumns;
  static thread_local std::vector<bf16> buffer;
  buffer.resize(2 * num_kv_heads * padded * size);
  bf16 *packed_keys = buffer.data(), *packed_values = packed_keys + num_kv_heads * padded * size;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (i64 unit = 0; unit < num_kv_heads * blocks; ++unit) {
    const i64 head = unit / blocks, at = head * padded * size;
    pack_block(context.of_head(head, size), size, unit % blocks * kColumns, length, padded, packed_keys + at, packed_values + at);
  }
  const i64 tiles = (tokens + kTileTokens - 1) / kTileTokens;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
  for (i64 unit = 0; unit < num_kv_heads * tiles; ++unit) {
    const i64 head = unit % num_kv_heads, begin = (tiles - 1 - unit / num_kv_heads) * kTileTokens, at = head * padded * size;
    prefill_tile(qkv, begin, std::min(begin + kTileTokens, tokens), start, head, heads, packed_keys + at, packed_values + at, padded,
                 scale * kLog2E, out);
  }
}

}  // extern "C"
