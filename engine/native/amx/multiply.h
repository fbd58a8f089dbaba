// Products with a packed matrix, by AMX's tiles of 16 rows and 32 inputs.
//
// An instruction adds up the products of the even inputs of a tile, and those of the odd ones, one after the other from
// zero, and then adds both sums to the result. So a row's bits depend on that row alone. Tiles of denormal numbers are
// read as zeros.
#pragma once

#include "common.h"

#include <algorithm>

constexpr i64 kColumns = 64;  // columns of a packed matrix
constexpr i64 kTile = 16;     // rows of a tile, and pairs of inputs

// C[rows, 64] (+)= A[rows, 2 pairs] B, where B is packed as [pairs][64][2] and `pairs` is a multiple of 16. Then calls `meanwhile`
// for each pair.
//
// One for each thread that computes. At its end the tiles are given back, so that the system need not keep them for it.
class Multiplier {
 public:
  Multiplier() = default;
  // With tiles that have so many rows from the start: for products that are not computed by this class.
  explicit Multiplier(i64 rows) { shape(rows, rows); }
  Multiplier(const Multiplier&) = delete;
  ~Multiplier() {
    if (upper_) asm volatile("tilerelease");
  }

  template <typename Meanwhile = Nothing>
  void operator()(const bf16* a, i64 lda, i64 rows, const bf16* b, i64 pairs, float* c, i64 ldc, bool add, const Meanwhile& meanwhile = {}) {
    for (i64 column = 0; column < kColumns; column += 2 * kTile)
      columns<2>(a, lda, rows, b + 2 * column, 2 * kColumns, pairs, c + column, ldc, add);
    for (i64 p = 0; p < pairs; ++p) meanwhile();
  }

  static constexpr i64 kFewQueries = 4;

  // Shape the tiles for up to 16 rows, and for `few_queries` beside them, unless they have this shape. They keep it until other
  // numbers of rows are multiplied.
  void few(i64 rows) {
    if (lower_ == 0 && upper_ == rows) return;
    upper_ = rows;
    lower_ = 0;
    Configuration configuration(rows, kTile);
    configuration.row_bytes[2] = configuration.row_bytes[3] = configuration.row_bytes[5] = kFewQueries * sizeof(float);
    load(configuration);
  }

  // 16 rows of A, `stride` values apart.
  struct Tile {
    const bf16* rows;
    i64 stride;
  };

  // C[32, 4] = A[32, kSize] B, where B is packed as [kSize / 2][4][2].
  template <i64 kSize>
  static void few_queries(Tile one, Tile other, const bf16* b, float* c) {
    constexpr i64 kRow = kFewQueries * sizeof(float);
    asm volatile("" ::: "memory");
    _tile_zero(2);
    _tile_zero(3);
    for (i64 first = 0; first < kSize; first += 2 * kTile) {
      _tile_loadd(5, b + first * kFewQueries, kRow);
      _tile_loadd(6, one.rows + first, one.stride * sizeof(bf16));
      _tile_dpbf16ps(2, 6, 5);
      _tile_loadd(7, other.rows + first, other.stride * sizeof(bf16));
      _tile_dpbf16ps(3, 7, 5);
    }
    _tile_stored(2, c, kRow);
    _tile_stored(3, c + kTile * kFewQueries, kRow);
    asm volatile("" ::: "memory");
  }

  // The same for 16 * N columns of B, whose pairs are `ldb` values apart.
  template <int N>
  void columns(const bf16* a, i64 lda, i64 rows, const bf16* b, i64 ldb, i64 pairs, float* c, i64 ldc, bool add) {
    for (; rows > 0; rows -= 2 * kTile, a += 2 * kTile * lda, c += 2 * kTile * ldc) {
      shape(std::min(rows, kTile), std::min(rows - kTile, kTile));
      if (rows > kTile) multiply<2, N>(a, lda, b, ldb, pairs, c, ldc, add);
      else multiply<1, N>(a, lda, b, ldb, pairs, c, ldc, add);
    }
  }

 private:
  struct alignas(64) Configuration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    // Tiles 0 to 3 are C, 4 and 5 A, 6 and 7 B; for `few_queries`, 2 and 3 are C, 6 and 7 A, 5 is B.
    Configuration(i64 upper, i64 lower) {
      for (int tile = 0; tile < 8; ++tile) row_bytes[tile] = 64;
      rows[0] = rows[1] = rows[4] = static_cast<uint8_t>(upper);
      rows[2] = rows[3] = rows[5] = static_cast<uint8_t>(lower);
      rows[6] = rows[7] = kTile;
    }
  };
  i64 upper_ = 0, lower_ = 0;  // the lower is 0 where the tiles have the shape of `few`

  // `lower` is not positive where the lower tiles of A and C are not used.
  void shape(i64 upper, i64 lower) {
    if (upper == upper_ && (lower <= 0 || lower == lower_)) return;
    upper_ = upper;
    lower_ = std::max<i64>(lower, 1);
    load({upper_, lower_});
  }

  static void load(const Configuration& configuration) { asm volatile("ldtilecfg %0" ::"m"(configuration)); }

  template <int M, int N>
  static void multiply(const bf16* a, i64 lda, const bf16* b, i64 ldb, i64 pairs, float* c, i64 ldc, bool add) {
    const i64 row = ldc * sizeof(float);
    asm volatile("" ::: "memory");  // the intrinsics do not tell the compiler what they read
    if (add) {
      _tile_loadd(0, c, row);
      if constexpr (N > 1) _tile_loadd(1, c + kTile, row);
      if constexpr (M > 1) _tile_loadd(2, c + kTile * ldc, row);
      if constexpr (M > 1 && N > 1) _tile_loadd(3, c + kTile * ldc + kTile, row);
    } else {
      _tile_zero(0);
      if constexpr (N > 1) _tile_zero(1);
      if constexpr (M > 1) _tile_zero(2);
      if constexpr (M > 1 && N > 1) _tile_zero(3);
    }
    for (i64 p = 0; p < pairs; p += kTile, a += 2 * kTile, b += kTile * ldb) {
      _tile_loadd(4, a, lda * sizeof(bf16));
      _tile_loadd(6, b, ldb * sizeof(bf16));
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (N > 1) {
        _tile_loadd(7, b + 2 * kTile, ldb * sizeof(bf16));
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (M > 1) {
        _tile_loadd(5, a + kTile * lda, lda * sizeof(bf16));
        _tile_dpbf16ps(2, 5, 6);
      }
      if constexpr (M > 1 && N > 1) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, row);
    if constexpr (N > 1) _tile_stored(1, c + kTile, row);
    if constexpr (M > 1) _tile_stored(2, c + kTile * ldc, row);
    if constexpr (M > 1 && N > 1) _tile_stored(3, c + kTile * ldc + kTile, row);
    asm volatile("" ::: "memory");
  }
};
