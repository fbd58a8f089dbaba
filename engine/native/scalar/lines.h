// Memory that begins on a line of the caches.
//
// Tiles, and registers as long as a line, take up to three times as long where they lie on two lines, as they mostly do in memory
// from malloc: it gives large pieces 16 bytes behind the beginning of a page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

template <typename T>
struct OnLines {
  using value_type = T;
  OnLines() = default;
  template <typename Other>
  OnLines(const OnLines<Other>&) {}
  T* allocate(std::size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{64})); }
  void deallocate(T* values, std::size_t) { ::operator delete(values, std::align_val_t{64}); }
  bool operator==(const OnLines&) const { return true; }
  bool operator!=(const OnLines&) const { return false; }
};

template <typename T>
using Lines = std::vector<T, OnLines<T>>;

// Memory for values that are written before they are read. It only grows, and what was in it is gone then: nothing is copied or
// filled with zeros. Longer contexts come step by step, so it is larger than need be; the system gives only what is touched.
template <typename T>
class Room {
 public:
  Room() = default;
  Room(const Room&) = delete;
  ~Room() { clear(); }

  T* of(int64_t count) {
    if (count > size_) {
      clear();
      values_ = OnLines<T>().allocate(count + count / 2);
      size_ = count + count / 2;
    }
    return values_;
  }

 private:
  void clear() {
    if (values_) OnLines<T>().deallocate(values_, size_);
    values_ = nullptr;
    size_ = 0;
  }

  T* values_ = nullptr;
  int64_t size_ = 0;
};
