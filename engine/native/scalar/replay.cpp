// Calls of operators that were noted, made again one after the other: see recording.py. Plain C++, the same for every
// instruction set.

#include <cstdint>

namespace {

using i64 = int64_t;

constexpr int kWords = 15;  // whole numbers and pointers of an operator at most

// An operator as the ABI of System V for x86-64 sees it: it takes whole numbers and pointers from one row of places, and
// float32 from another, whatever their order among each other; and it never looks at places behind its own. So all operators
// with up to kWords of the first and one of the second kind are called alike.
using Operator = void (*)(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, float);

struct Call {
  Operator function;
  i64 words[kWords];
  float number;
};

}  // namespace

extern "C" void replay(const Call* calls, i64 count) {
  for (const Call* call = calls; call < calls + count; ++call) {
    const i64* w = call->words;
    call->function(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13], w[14], call->number);
  }
}
