// Loads, stores and atomics.
#include <algorithm>
#include <cstring>
#include <functional>

#include "lanes.h"

namespace ptx {

namespace {

template <class T>
void load(Warp& warp, const Instruction& instruction) {
  for_active(warp, [&](int lane) {
    const std::byte* from = warp.at(instruction, lane, instruction.values * sizeof(T), instruction.values * sizeof(T));
    std::array<T, 4> values;
    std::memcpy(values.data(), from, instruction.values * sizeof(T));
    for (int i = 0; i < instruction.values; ++i) warp.slot(instruction.operand[1 + i])[lane] = bits_of(values[i]);
  });
}

template <class T>
void store(Warp& warp, const Instruction& instruction) {
  for_active(warp, [&](int lane) {
    std::byte* to = warp.at(instruction, lane, instruction.values * sizeof(T), instruction.values * sizeof(T));
    for (int i = 0; i < instruction.values; ++i) {
      const T value = read<T>(warp.slot(instruction.operand[1 + i]), lane);
      std::memcpy(to + i * sizeof(T), &value, sizeof(T));
    }
  });
}

// Lane after lane.
template <class T, auto join>
void atomic(Warp& warp, const Instruction& instruction) {
  for_active(warp, [&](int lane) {
    std::byte* at = warp.at(instruction, lane, sizeof(T), sizeof(T));
    T old;
    std::memcpy(&old, at, sizeof(T));
    const T joined = join(old, read<T>(warp.slot(instruction.operand[2]), lane));
    std::memcpy(at, &joined, sizeof(T));
    warp.slot(instruction.operand[1])[lane] = bits_of(old);
  });
}

Table memory_opcodes() {
  Table table;
  const auto add = [&]<class T>(const std::string& type, T) {
    table["ld." + type] = load<T>;
    table["st." + type] = store<T>;
  };
  for_integers([&]<class T>(Type<T> type) {
    add(type.name, T{});
    if constexpr (sizeof(T) >= 4) {
      table[std::string("add.") + type.name] = atomic<T, [](T a, T b) { return wrapped<T>(std::plus{}, a, b); }>;
      table[std::string("min.") + type.name] = atomic<T, [](T a, T b) { return std::min(a, b); }>;
      table[std::string("max.") + type.name] = atomic<T, [](T a, T b) { return std::max(a, b); }>;
    }
  });
  add("b8", std::uint8_t{}), add("b16", std::uint16_t{}), add("b32", std::uint32_t{}), add("b64", std::uint64_t{});
  add("f32", f32{}), add("f64", f64{});
  table["or.b32"] = atomic<std::uint32_t, [](std::uint32_t a, std::uint32_t b) { return a | b; }>;
  table["add.f32"] = atomic<f32, [](f32 a, f32 b) { return canonical(a + b); }>;
  table["add.f64"] = atomic<f64, [](f64 a, f64 b) { return canonical(a + b); }>;
  return table;
}

}  // namespace

Operation memory_operation_of(const std::string& kind, const std::string& type) {
  static const Table table = memory_opcodes();
  return found(table, kind + "." + type);
}

}  // namespace ptx
