// From logits to tokens, by the rules of engine/sampler.py. Plain C++, the same for every instruction set: the compiler makes
// vectors of the passes over a row. Gaps and masses have the same bits with all of them; logarithms are the C library's.
//
// Few of a row's tokens are looked at one by one. Those near the best one are scored first. Another one can only win with a
// small word, since the noise falls as the word grows: below its mass times a bound.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

using i64 = int64_t;

constexpr i64 kBlock = 64;     // tokens that a pass tests together
constexpr float kNear = -3.0f;  // gaps of the tokens that are scored first: nats below the best one
constexpr float kPart = 1.0f;   // tokens are sorted in parts that are so wide
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// What a row is sampled for: _REQUEST in sampling.py.
struct Request {
  double top_p;       // 1 keeps all tokens
  uint64_t seed;
  int32_t top_k;      // 0 keeps all tokens
  float temperature;  // 0 takes the best token
  float min_gap;      // what min-p allows
  uint32_t choice, position;
};

struct Token {
  float gap;
  int32_t id;

  bool operator<(const Token& other) const { return gap > other.gap || (gap == other.gap && id < other.id); }  // likelier
};

// The first token from `id` on that passes a test, or how many tokens there are. Blocks of which none passes are cheap.
template <typename Test>
i64 next_that(i64 id, i64 tokens, Test test) {
  for (; id + kBlock <= tokens; id += kBlock) {
    int any = 0;
    for (i64 i = id; i < id + kBlock; ++i) any |= test(i);
    if (any) break;
  }
  while (id < tokens && !test(id)) ++id;
  return id;
}

// Call visit(id) for each token that passes a test, by rising id.
template <typename Test, typename Visit>
void each_that(i64 tokens, Test test, Visit visit) {
  for (i64 id = next_that(0, tokens, test); id < tokens; id = next_that(id + 1, tokens, test)) visit(id);
}

// The best token, the lowest id of equal ones. One that is no number is better than any other, as it is for torch.
i64 best_token(const float* logits, i64 tokens) {
  const i64 strange = next_that(0, tokens, [&](i64 id) { return logits[id] != logits[id]; });
  if (strange < tokens) return strange;
  float highest[kBlock];
  std::fill_n(highest, kBlock, -kInfinity);
  for (i64 first = 0; first < tokens; first += kBlock) {
    const i64 count = std::min(tokens - first, kBlock);
    for (i64 i = 0; i < count; ++i) {
      const float logit = logits[first + i];
      highest[i] = logit > highest[i] ? logit : highest[i];
    }
  }
  const float best = *std::max_element(highest, highest + kBlock);
  return next_that(0, tokens, [&](i64 id) { return logits[id] == best; });
}

// e^gap for gaps from -80 to 0, to a relative error of 2e-7; for others any number, or none.
inline float mass(float gap) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: the last bits of a sum with it are its whole part
  const float shifted = gap * 1.44269504f + kRound, whole = shifted - kRound;
  const float rest = std::fma(whole, -1.42860682e-6f, std::fma(whole, -0.693145752f, gap));
  const float cubic = std::fma(std::fma(std::fma(1.0f / 720, rest, 1.0f / 120), rest, 1.0f / 24), rest, 1.0f / 6);
  const float sum = std::fma(std::fma(std::fma(cubic, rest, 0.5f), rest, 1.0f), rest, 1.0f);
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 127) << 23;  // the power of two; kRound's own bits are shifted out
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return sum * power;
}

// The tokens of a row that may be drawn.
class Choice {
 public:
  Choice(const float* gaps, i64 tokens, float hopeful) : gaps_(gaps), tokens_(tokens), least_(hopeful) {}

  int has(i64 id) const {
    const float gap = gaps_[id];
    const int hopeful = gap >= least_, before = gap > cut_.gap, equal = gap == cut_.gap, early = id <= cut_.id;
    return hopeful & (before | (equal & early));
  }

  // Tokens as likely as the last one stay.
  void keep_top_k(i64 k) {
    by_parts([&](std::vector<Token>& part) {
      const i64 count = part.size();
      if (k > count) return k -= count, true;
      std::nth_element(part.begin(), part.begin() + k - 1, part.end());
      return least_ = part[k - 1].gap, false;
    });
  }

  // The fewest likeliest tokens whose mass reaches top_p, at least one; of equally likely ones, lower ids come first.
  void keep_top_p(double top_p) {
    double before = 0;
    const double target = top_p * total_mass();
    by_parts([&](std::vector<Token>& part) {
      double all = before;
      for (const Token& token : part) all += mass(token.gap);
      if (all < target) return before = all, true;
      std::sort(part.begin(), part.end());
      for (const Token& token : part) {
        if (before >= target && before > 0) break;
        cut_ = token, before += mass(token.gap);
      }
      return false;
    });
  }

  void keep_min_gap(float gap) { least_ = std::max(least_, gap); }

 private:
  const float* gaps_;
  const i64 tokens_;
  float least_;
  Token cut_{-kInfinity, 0};  // the last token of top-p

  // Take the tokens that are left in parts of falling gaps, until `take` has had enough of them.
  template <typename Take>
  void by_parts(Take take) const {
    static thread_local std::vector<Token> part;
    float below = kInfinity;
    for (float from = -kPart; below > least_; below = from, from -= kPart) {
      const float lowest = std::max(from, least_);
      part.clear();
      each_that(tokens_, [&](i64 id) { return (gaps_[id] >= lowest) & (gaps_[id] < below); },
                [&](i64 id) { part.push_back({gaps_[id], static_cast<int32_t>(id)}); });
      if (!take(part)) return;
    }
  }

  double total_mass() const {
    double sums[kBlock] = {};
    for (i64 first = 0; first < tokens_; first += kBlock) {
      const i64 count = std::min(tokens_ - first, kBlock);
      for (i64 i = 0; i < count; ++i) {
        const float gap = gaps_[first + i], weight = mass(gap);
        sums[i] += gap >= least_ ? weight : 0.0f;
      }
    }
    double total = 0;
    for (const double sum : sums) total += sum;
    return total;
  }
};

// The words of one draw, and the noise of them: noise.py.
class Noise {
 public:
  explicit Noise(const Request& request) : first_(key(0x243F6A88, request)), second_(key(0x85A308D3, request)) {}

  uint32_t word(uint32_t token) const { return mix(mix(token + first_) ^ second_); }

  double gumbel(uint32_t token) const { return -std::log(-std::log1p(-((word(token) + 0.5) / 4294967296.0))); }

 private:
  const uint32_t first_, second_;

  static uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * 0x7FEB352D;
    x = (x ^ x >> 15) * 0x846CA68B;
    return x ^ x >> 16;
  }

  static uint32_t key(uint32_t key, const Request& request) {
    const auto low = static_cast<uint32_t>(request.seed), high = static_cast<uint32_t>(request.seed >> 32);
    for (const uint32_t coordinate : {low, high, request.choice, request.position}) key = mix((key + 0x9E3779B9) ^ coordinate);
    return key;
  }
};

// The token with the largest gap + noise; the lowest id if two are equal.
i64 draw(const float* gaps, i64 tokens, const Choice& choice, const Noise& noise) {
  double lead = -std::numeric_limits<double>::infinity();
  i64 drawn = 0;
  const auto score = [&](i64 id) {
    const double score = gaps[id] + noise.gumbel(id);
    if (score > lead || (score == lead && id < drawn)) lead = score, drawn = id;
  };
  each_that(tokens, [&](i64 id) { return (gaps[id] >= kNear) & choice.has(id); }, score);
  // A noise of x and more needs a word below 2^32 (1 - exp(-exp(-x))), which is at most 2^32 exp(-x). Halves fit into int32_t.
  const float bound = 2147483648.0 * 1.001 * std::exp(-lead);
  const auto may_win = [&](i64 id) {
    const float half = static_cast<int32_t>(noise.word(id) >> 1);
    const int low = half <= bound * mass(gaps[id]) + 2.0f, far = gaps[id] < kNear;
    return low & far & choice.has(id);
  };
  each_that(tokens, may_win, score);
  return drawn;
}

i64 sample_row(const float* logits, i64 tokens, const Request& request, float hopeful) {
  const i64 best = best_token(logits, tokens);
  if (request.temperature == 0) return best;
  static thread_local std::vector<float> room;
  room.resize(tokens);
  float* gaps = room.data();
  const float highest = logits[best];
  for (i64 id = 0; id < tokens; ++id) gaps[id] = (logits[id] - highest) / request.temperature;
  gaps[best] = 0;  // even where it is no number: every token is masked, or the best logit is infinite
  Choice choice(gaps, tokens, hopeful);
  if (request.top_k > 0) choice.keep_top_k(request.top_k);
  if (request.top_p < 1) choice.keep_top_p(request.top_p);
  choice.keep_min_gap(request.min_gap);
  return draw(gaps, tokens, choice, Noise(request));
}

}  // namespace

extern "C" {

// A token for each row of logits. Those whose gap is below `hopeful` can't win by any noise.
void sample(const float* const* rows, const Request* requests, i64* picks, i64 count, i64 tokens, float hopeful, i64 threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (count > 1)
  for (i64 i = 0; i < count; ++i) picks[i] = sample_row(rows[i], tokens, requests[i], hopeful);
}
}
