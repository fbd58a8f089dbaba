// A record: the values of 16 outputs and 32 inputs in four or eight bits, with a float16 scale and minimum for each output. It
// begins with 16 scales and 16 minimums. In which order the values follow, the record.h of a set of operators says.
#pragma once

#include <cstdint>

constexpr int64_t kGroup = 32, kOutputs = 16;

template <int kBits>
constexpr int64_t kRecordBytes = kOutputs * (4 + kGroup * kBits / 8);
