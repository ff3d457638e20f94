// Values of a slot as numbers, and what the files of operations share.
#pragma once

#include <bit>
#include <string>
#include <type_traits>
#include <unordered_map>

#include "machine.h"

namespace ptx {

using Table = std::unordered_map<std::string, Operation>;
using f32 = float;
using f64 = double;

template <std::size_t bytes>
using unsigned_t = std::conditional_t<
    bytes == 1, std::uint8_t,
    std::conditional_t<bytes == 2, std::uint16_t, std::conditional_t<bytes == 4, std::uint32_t, std::uint64_t>>>;
template <class T>
constexpr bool kIsInteger = std::is_integral_v<T>;

template <class T>
T read(const std::uint64_t* slot, int lane) {
  if constexpr (std::is_same_v<T, bool>) {
    return slot[0] >> lane & 1;
  } else {
    return std::bit_cast<T>(static_cast<unsigned_t<sizeof(T)>>(slot[lane]));
  }
}

// Signed integers with their sign, so that a wider read finds it (ld.s8 into a register of 32 bits).
template <class T>
std::uint64_t bits_of(T value) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<std::uint64_t>(value);
  } else {
    return std::bit_cast<unsigned_t<sizeof(T)>>(value);
  }
}

// Arithmetic modulo 2^n: signed overflow is none of C++'s business here.
template <class T, class F>
constexpr T wrapped(F f, T a, T b) {
  using U = std::make_unsigned_t<T>;
  return static_cast<T>(static_cast<U>(f(static_cast<std::uint64_t>(static_cast<U>(a)), static_cast<U>(b))));
}

// A NaN that arithmetic makes of float32 is 0x7fffffff, whatever came in.
inline f32 canonical(f32 x) { return x != x ? std::bit_cast<f32>(0x7fffffffu) : x; }
inline f64 canonical(f64 x) { return x; }

template <class D>
struct Type {
  const char* name;
};
template <class F>
void for_integers(F f) {
  f(Type<std::int8_t>{"s8"}), f(Type<std::uint8_t>{"u8"}), f(Type<std::int16_t>{"s16"}), f(Type<std::uint16_t>{"u16"});
  f(Type<std::int32_t>{"s32"}), f(Type<std::uint32_t>{"u32"}), f(Type<std::int64_t>{"s64"}),
      f(Type<std::uint64_t>{"u64"});
}

template <class F>
void for_active(const Warp& warp, F f) {
  for (unsigned rest = warp.active; rest != 0; rest &= rest - 1) f(std::countr_zero(rest));
}

inline Operation found(const Table& table, const std::string& opcode) {
  const auto entry = table.find(opcode);
  if (entry == table.end())
    throw std::runtime_error("no operation " + opcode + ": add it to the files of operations in tests/ptx");
  return entry->second;
}

}  // namespace ptx
