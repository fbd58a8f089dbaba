// How contexts are brought near before they are read: what was best on an AMD EPYC of the 3rd generation.
#pragma once

#include <immintrin.h>

constexpr int64_t kNearBytes = 24 << 10;     // so far ahead keys are asked for, but at least as many tokens as are read at a time
constexpr auto kNearHint = _MM_HINT_T0;      // into the first cache
