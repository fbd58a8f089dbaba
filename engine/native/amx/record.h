// How the values of a record lie: the inputs of one output after those of the other. Eight bits are bytes. Four bits lie in words of
// 16 bits, one for each input, that have its values for four outputs, the first lowest.
#pragma once

#include <record_sizes.h>

// The bits of a value, in the lowest places.
template <int kBits>
inline int stored_value(const uint8_t* record, int output, int input) {
  const uint8_t* values = record + 4 * kOutputs;
  if (kBits == 8) return values[output * kGroup + input];
  return reinterpret_cast<const uint16_t*>(values)[output / 4 * kGroup + input] >> (4 * (output % 4)) & 15;
}
