// How contexts are brought near before they are read: what was best on an Intel Xeon of the 5th generation.
#pragma once

#include <immintrin.h>

constexpr int64_t kNear = 48 << 10;          // bytes of keys of the next chunk that are asked for during the one before
constexpr _mm_hint kNearHint = _MM_HINT_T1;  // the second cache
