// Bytes of a fuzzer read as sizes, choices and elements. When they run out, a generator seeded by them goes on, so that
// few bytes make large inputs.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "elements.h"

namespace fuzz {

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : at_(data), end_(data + size) {}

  std::uint64_t bits(int bytes) {
    std::uint64_t value = 0;
    if (end_ - at_ >= bytes) {
      std::memcpy(&value, at_, static_cast<std::size_t>(bytes));
      at_ += bytes;
      state_ = (state_ ^ value) * 0x9e3779b97f4a7c15u;
      return value;
    }
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return (state_ ^ state_ >> 29) >> 8 & ((std::uint64_t{1} << 8 * bytes / 2 << 8 * bytes / 2) - 1);
  }

  int between(int low, int high) {
    return low + static_cast<int>(bits(3) % (static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low) + 1));
  }
  bool flip() { return bits(1) & 1; }

  template <class T, int n>
  T pick(const T (&choices)[n]) {
    return choices[bits(1) % n];
  }

  template <class A>
  A any_bits() {
    const std::uint64_t value = bits(sizeof(A));
    A x;
    std::memcpy(&x, &value, sizeof x);
    return x;
  }

  template <class A>
  A positive() {  // finite and not zero
    const A x = std::fabs(any_bits<A>());
    const A ordinary[] = {A(0.1), A(1), A(0.5), A(0.037), A(3), A(1e-6), A(777), std::numeric_limits<A>::min()};
    return flip() || !(x > 0 && x <= std::numeric_limits<A>::max()) ? pick(ordinary) : x;
  }

  // An element that is interesting where multiples of `scale` and the places half-way between them decide.
  template <class A>
  A near_steps(A scale) {
    constexpr A kSpecials[] = {A(0),
                               A(-0.0),
                               std::numeric_limits<A>::infinity(),
                               -std::numeric_limits<A>::infinity(),
                               std::numeric_limits<A>::quiet_NaN(),
                               std::numeric_limits<A>::denorm_min(),
                               -std::numeric_limits<A>::min(),
                               std::numeric_limits<A>::max(),
                               std::numeric_limits<A>::lowest()};
    const int kind = static_cast<int>(bits(1) % 16);
    if (kind == 0) return pick(kSpecials);
    if (kind == 1) return any_bits<A>();
    const int halves = kind < 4 ? between(-70000, 70000) : between(-40, 40);
    A x = static_cast<A>(halves) * (scale / 2);
    if (kind < 8) x *= static_cast<A>(bits(2)) / 32768;  // anywhere in between
    for (int i = between(-2, 2); i != 0; i += i < 0 ? 1 : -1) x = std::nextafter(x, i < 0 ? -HUGE_VAL : HUGE_VAL);
    return x;
  }

  template <class T>
  std::vector<T> elements(std::int64_t n, arithmetic_t<T> scale) {
    std::vector<T> x(static_cast<std::size_t>(n));
    for (T& e : x) e = narrowed<T>(near_steps(scale));
    return x;
  }

 private:
  const std::uint8_t *at_, *end_;
  std::uint64_t state_ = 0x243f6a8885a308d3u;
};

// Calls target(T{}, function from a table of kernels to those of T) for an element type that the input chooses.
template <class Target>
void with_element_type(Input& input, Target target) {
  switch (input.bits(1) % 4) {
    case 0:
      return target(float{}, [](auto& table) -> auto& { return table.f32; });
    case 1:
      return target(double{}, [](auto& table) -> auto& { return table.f64; });
    case 2:
      return target(Float16{}, [](auto& table) -> auto& { return table.f16; });
    default:
      return target(BFloat16{}, [](auto& table) -> auto& { return table.bf16; });
  }
}

}  // namespace fuzz
