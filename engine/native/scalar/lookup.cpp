// Rows of packed matrices, unpacked again: the embeddings of tokens, from the matrix that is the output head too. Plain C++, the
// same for every instruction set but for what its record.h says. See library.py for the contracts in Python, and for packing.

#include <immintrin.h>
#include <record.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

using i64 = int64_t;

constexpr i64 kBlock = 16, kColumns = 64;

// To the nearest, ties to the even one; a NaN stays one.
void put(uint16_t* to, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  *to = std::isnan(value) ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void put(float* to, float value) { *to = value; }

bool all_inside(const i64* ids, i64 count, i64 outputs) {
  for (i64 i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= outputs) return false;
  }
  return true;
}

template <int kBits, typename T>
void quantized_row(const uint8_t* records, i64 id, T* out, i64 inputs) {
  const i64 groups = inputs / kGroup;
  const uint8_t* record = records + id / kOutputs * groups * kRecordBytes<kBits>;
  const int place = id % kOutputs;
  for (i64 group = 0; group < groups; ++group, record += kRecordBytes<kBits>, out += kGroup) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(record);
    const float scale = _cvtsh_ss(halves[place]), minimum = _cvtsh_ss(halves[kOutputs + place]);
    for (int input = 0; input < kGroup; ++input) {
      const int bits = stored_value<kBits>(record, place, input);
      const float value = kBits == 8 ? static_cast<int8_t>(bits) : bits;
      put(out + input, value * scale + minimum);
    }
  }
}

template <typename T>
bool quantized_rows(const uint8_t* records, const i64* ids, T* out, i64 count, i64 inputs, i64 outputs, i64 bits, i64 threads) {
  if (!all_inside(ids, count, outputs)) return false;
#pragma omp parallel for num_threads(threads) if (count > 16)
  for (i64 i = 0; i < count; ++i) {
    if (bits == 8) {
      quantized_row<8>(records, ids[i], out + i * inputs, inputs);
    } else {
      quantized_row<4>(records, ids[i], out + i * inputs, inputs);
    }
  }
  return true;
}

// bfloat16: pairs of inputs of 64 outputs. float32: inputs of 16 outputs.
void dense_row(const uint16_t* packed, i64 id, uint16_t* out, i64 inputs) {
  const uint16_t* from = packed + id / kColumns * kColumns * inputs + id % kColumns * 2;
  for (i64 i = 0; i < inputs; i += 2) std::memcpy(out + i, from + i * kColumns, 2 * sizeof *out);
}

void dense_row(const float* packed, i64 id, float* out, i64 inputs) {
  const float* from = packed + id / kBlock * kBlock * inputs + id % kBlock;
  for (i64 i = 0; i < inputs; ++i) out[i] = from[i * kBlock];
}

template <typename T>
bool dense_rows(const T* packed, const i64* ids, T* out, i64 count, i64 inputs, i64 outputs, i64 threads) {
  if (!all_inside(ids, count, outputs)) return false;
#pragma omp parallel for num_threads(threads) if (count > 16)
  for (i64 i = 0; i < count; ++i) dense_row(packed, ids[i], out + i * inputs, inputs);
  return true;
}

}  // namespace

extern "C" {

bool quantized_embedding(
    const uint8_t* records, const i64* ids, uint16_t* out, i64 count, i64 inputs, i64 outputs, i64 bits, i64 threads) {
  return quantized_rows(records, ids, out, count, inputs, outputs, bits, threads);
}

bool quantized_embedding_float32(
    const uint8_t* records, const i64* ids, float* out, i64 count, i64 inputs, i64 outputs, i64 bits, i64 threads) {
  return quantized_rows(records, ids, out, count, inputs, outputs, bits, threads);
}

bool dense_embedding(
    const uint16_t* packed, const i64* ids, uint16_t* out, i64 count, i64 inputs, i64 outputs, i64 threads) {
  return dense_rows(packed, ids, out, count, inputs, outputs, threads);
}

bool dense_embedding_float32(const float* packed, const i64* ids, float* out, i64 count, i64 inputs, i64 outputs, i64 threads) {
  return dense_rows(packed, ids, out, count, inputs, outputs, threads);
}
}
