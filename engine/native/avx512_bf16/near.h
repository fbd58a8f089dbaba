// How contexts are brought near before they are read: what was best on an AMD EPYC of the 5th generation.
#pragma once

#include <immintrin.h>

constexpr int64_t kNearBytes = 24 << 10;     // so far ahead keys are asked for, but 64 to 128 tokens
constexpr auto kNearHint = _MM_HINT_T0;      // into the first cache
