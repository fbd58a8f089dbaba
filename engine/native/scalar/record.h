// How the values of a record lie: words of 16 bits. A word has the same half of 16 / kBits pairs of inputs, the first lowest. An
// output's two words, for the first and the second inputs of pairs, lie side by side, and those of 16 outputs follow each other.
#pragma once

#include <record_sizes.h>

// The bits of a value, in the lowest places.
template <int kBits>
inline int stored_value(const uint8_t* record, int output, int input) {
  constexpr int kPairs = 16 / kBits;
  const int pair = input / 2;
  const uint16_t* words = reinterpret_cast<const uint16_t*>(record + 4 * kOutputs) + pair / kPairs * 2 * kOutputs;
  return words[2 * output + input % 2] >> (kBits * (pair % kPairs)) & ((1 << kBits) - 1);
}
