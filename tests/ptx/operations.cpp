// What each opcode computes, as the PTX ISA says: an operation for every typed form that nvcc makes of our kernels.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "lanes.h"

namespace ptx {

namespace {

using f16 = _Float16;
struct bf16 {
  std::uint16_t bits;
};
// operand[0] = f(operand[1], ...) in the active lanes.
template <auto f, class... A>
void lanewise(Warp& warp, const Instruction& instruction) {
  using R = std::invoke_result_t<decltype(f), A...>;
  const auto all = [&]<std::size_t... k>(std::index_sequence<k...>) {
    const std::uint64_t* const from[] = {warp.slot(instruction.operand[1 + k])...};
    std::uint64_t* const to = warp.slot(instruction.operand[0]);
    const unsigned active = warp.active;
    if constexpr (std::is_same_v<R, bool>) {
      unsigned mask = 0;
      for (int lane = 0; lane < kLanes; ++lane) mask |= (f(read<A>(from[k], lane)...) ? 1u : 0u) << lane;
      to[0] = (to[0] & ~active) | (mask & active);
    } else if (active == ~0u) {
      for (int lane = 0; lane < kLanes; ++lane) to[lane] = bits_of(f(read<A>(from[k], lane)...));
    } else {
      for (unsigned rest = active; rest != 0; rest &= rest - 1) {
        const int lane = std::countr_zero(rest);
        to[lane] = bits_of(f(read<A>(from[k], lane)...));
      }
    }
  };
  all(std::index_sequence_for<A...>{});
}

template <class T>
using wide_t = std::conditional_t<
    sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, std::int32_t, std::uint32_t>,
    std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>,
                       std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>>;

// -0 < +0, and a NaN loses.
template <class T>
T least(T a, T b) {
  if (a != a) return canonical(b);
  if (b != b) return a;
  return a < b || (a == b && std::signbit(a)) ? a : b;
}
template <class T>
T most(T a, T b) {
  return -least<T>(-a, -b);
}

template <class T>
void add_integers(Table& table, const std::string& type) {
  const auto add = [&](const std::string& name, Operation operation) { table[name + "." + type] = operation; };
  add("add", lanewise<[](T a, T b) { return wrapped<T>(std::plus{}, a, b); }, T, T>);
  add("sub", lanewise<[](T a, T b) { return wrapped<T>(std::minus{}, a, b); }, T, T>);
  add("mul.lo", lanewise<[](T a, T b) { return wrapped<T>(std::multiplies{}, a, b); }, T, T>);
  add("mul.hi", lanewise<[](T a, T b) { return static_cast<T>(wide_t<T>{a} * b >> 8 * sizeof(T)); }, T, T>);
  add("mad.lo",
      lanewise<[](T a, T b, T c) { return wrapped<T>(std::plus{}, wrapped<T>(std::multiplies{}, a, b), c); }, T, T, T>);
  if constexpr (sizeof(T) < 8)
    add("mul.wide", lanewise<[](T a, T b) { return static_cast<wide_t<T>>(wide_t<T>{a} * b); }, T, T>);
  // Division by zero and the one that overflows are undefined: all bits set is what devices give.
  add("div", lanewise<[](T a, T b) {
        return b == 0                                           ? static_cast<T>(-1)
               : b == static_cast<T>(-1) && std::is_signed_v<T> ? wrapped<T>(std::minus{}, T{0}, a)
                                                                : static_cast<T>(a / b);
      },
                      T, T>);
  add("rem", lanewise<[](T a, T b) {
        return b == 0 ? a : b == static_cast<T>(-1) && std::is_signed_v<T> ? T{0} : static_cast<T>(a % b);
      },
                      T, T>);
  add("min", lanewise<[](T a, T b) { return std::min(a, b); }, T, T>);
  add("max", lanewise<[](T a, T b) { return std::max(a, b); }, T, T>);
  add("neg", lanewise<[](T a) { return wrapped<T>(std::minus{}, T{0}, a); }, T>);
  add("abs", lanewise<[](T a) { return a < T{0} ? wrapped<T>(std::minus{}, T{0}, a) : a; }, T>);
  // Shifts beyond the width leave nothing, or signs.
  add("shr",
      lanewise<[](T a, std::uint32_t by) { return static_cast<T>(by < 8 * sizeof(T) ? a >> by
                                                                 : a < T{0}         ? -1
                                                                                    : 0); },
               T, std::uint32_t>);
  const auto compare = [&](const std::string& name, Operation operation) {
    table["setp." + name + "." + type] = operation;
  };
  compare("eq", lanewise<[](T a, T b) { return a == b; }, T, T>);
  compare("ne", lanewise<[](T a, T b) { return a != b; }, T, T>);
  for (const char* name : {"lt", "lo"}) compare(name, lanewise<[](T a, T b) { return a < b; }, T, T>);
  for (const char* name : {"le", "ls"}) compare(name, lanewise<[](T a, T b) { return a <= b; }, T, T>);
  for (const char* name : {"gt", "hi"}) compare(name, lanewise<[](T a, T b) { return b < a; }, T, T>);
  for (const char* name : {"ge", "hs"}) compare(name, lanewise<[](T a, T b) { return a >= b; }, T, T>);
}

template <class T>
void add_floats(Table& table, const std::string& type) {
  const auto add = [&](const std::string& name, Operation operation) { table[name + "." + type] = operation; };
  for (const char* rounding : {"", ".rn"}) {
    const auto rounded = [&](const std::string& name, Operation operation) { add(name + rounding, operation); };
    rounded("add", lanewise<[](T a, T b) { return canonical(a + b); }, T, T>);
    rounded("sub", lanewise<[](T a, T b) { return canonical(a - b); }, T, T>);
    rounded("mul", lanewise<[](T a, T b) { return canonical(a * b); }, T, T>);
    rounded("div", lanewise<[](T a, T b) { return canonical(a / b); }, T, T>);
    rounded("fma", lanewise<[](T a, T b, T c) { return canonical(std::fma(a, b, c)); }, T, T, T>);
    rounded("rcp", lanewise<[](T a) { return canonical(T{1} / a); }, T>);
    rounded("sqrt", lanewise<[](T a) { return canonical(std::sqrt(a)); }, T>);
  }
  add("neg", lanewise<[](T a) { return -a; }, T>);
  add("abs", lanewise<[](T a) { return std::fabs(a); }, T>);
  add("min", lanewise<[](T a, T b) { return least(a, b); }, T, T>);
  add("max", lanewise<[](T a, T b) { return most(a, b); }, T, T>);
  add("min.NaN", lanewise<[](T a, T b) { return canonical(a != a || b != b ? a + b : least(a, b)); }, T, T>);
  add("max.NaN", lanewise<[](T a, T b) { return canonical(a != a || b != b ? a + b : most(a, b)); }, T, T>);
  const auto compare = [&](const std::string& name, Operation operation) {
    table["setp." + name + "." + type] = operation;
  };
  compare("eq", lanewise<[](T a, T b) { return a == b; }, T, T>);
  compare("ne", lanewise<[](T a, T b) { return a < b || b < a; }, T, T>);
  compare("lt", lanewise<[](T a, T b) { return a < b; }, T, T>);
  compare("le", lanewise<[](T a, T b) { return a <= b; }, T, T>);
  compare("gt", lanewise<[](T a, T b) { return b < a; }, T, T>);
  compare("ge", lanewise<[](T a, T b) { return a >= b; }, T, T>);
  compare("equ", lanewise<[](T a, T b) { return !(a < b || a > b); }, T, T>);
  compare("neu", lanewise<[](T a, T b) { return a != b; }, T, T>);
  compare("ltu", lanewise<[](T a, T b) { return !(a >= b); }, T, T>);
  compare("leu", lanewise<[](T a, T b) { return !(a > b); }, T, T>);
  compare("gtu", lanewise<[](T a, T b) { return !(a <= b); }, T, T>);
  compare("geu", lanewise<[](T a, T b) { return !(a < b); }, T, T>);
  compare("num", lanewise<[](T a, T b) { return a == a && b == b; }, T, T>);
  compare("nan", lanewise<[](T a, T b) { return a != a || b != b; }, T, T>);
  for (const auto& [name, operation] :
       {std::pair<const char*, Operation>{"cvt.rni.", lanewise<[](T a) { return canonical(std::nearbyint(a)); }, T>},
        {"cvt.rzi.", lanewise<[](T a) { return canonical(std::trunc(a)); }, T>},
        {"cvt.rmi.", lanewise<[](T a) { return canonical(std::floor(a)); }, T>},
        {"cvt.rpi.", lanewise<[](T a) { return canonical(std::ceil(a)); }, T>}}) {
    table[name + type + "." + type] = operation;
  }
}

template <class T>
void add_bits(Table& table, const std::string& type) {
  const auto add = [&](const std::string& name, Operation operation) { table[name + "." + type] = operation; };
  add("and", lanewise<[](T a, T b) { return static_cast<T>(a & b); }, T, T>);
  add("or", lanewise<[](T a, T b) { return static_cast<T>(a | b); }, T, T>);
  add("xor", lanewise<[](T a, T b) { return static_cast<T>(a ^ b); }, T, T>);
  if constexpr (std::is_same_v<T, bool>) {
    add("not", lanewise<[](T a) { return !a; }, T>);
    add("mov", lanewise<[](T a) { return a; }, T>);
  } else {
    add("not", lanewise<[](T a) { return static_cast<T>(~a); }, T>);
    add("shl", lanewise<[](T a, std::uint32_t by) { return static_cast<T>(by < 8 * sizeof(T) ? a << by : 0); }, T,
                        std::uint32_t>);
    add("setp.eq", lanewise<[](T a, T b) { return a == b; }, T, T>);
    add("setp.ne", lanewise<[](T a, T b) { return a != b; }, T, T>);
    const auto in_place = [&](const char* name, Operation operation) {
      table[name + std::to_string(8 * sizeof(T))] = operation;
    };
    in_place("pack.", [](Warp& warp, const Instruction& instruction) {
      std::uint64_t* to = warp.slot(instruction.operand[0]);
      const std::uint64_t *from = warp.slot(instruction.operand[1]), *by = warp.slot(instruction.operand[2]);
      for (unsigned rest = warp.active; rest != 0; rest &= rest - 1) {
        const int lane = std::countr_zero(rest);
        const std::uint64_t field = std::uint64_t{static_cast<T>(-1)} << by[lane];
        to[lane] = (to[lane] & ~field) | std::uint64_t{static_cast<T>(from[lane])} << by[lane];
      }
    });
    in_place("unpack.", lanewise<[](std::uint64_t a, std::uint32_t by) { return static_cast<T>(a >> by); },
                                 std::uint64_t, std::uint32_t>);
  }
}

// NaN becomes 0; where float64 or 64 bits take part, the least integer (PTX ISA, cvt).
template <class D, class S>
D truncated(S x) {
  constexpr S above = static_cast<S>(std::numeric_limits<D>::max()) + (sizeof(D) < sizeof(S) ? S{1} : S{0});
  if (x != x) return sizeof(S) == 8 || sizeof(D) == 8 ? static_cast<D>(D{1} << (8 * sizeof(D) - 1)) : D{0};
  x = std::trunc(x);
  if (x >= above) return std::numeric_limits<D>::max();
  if (x < static_cast<S>(std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
  return static_cast<D>(x);
}

f16 half(std::uint32_t bits) { return std::bit_cast<f16>(static_cast<std::uint16_t>(bits)); }
f16 to_f16(f32 x) { return x != x ? half(0x7fff) : static_cast<f16>(x); }
bf16 to_bf16(f32 x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return {static_cast<std::uint16_t>(x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
// Rounds once: float32 holds more than twice the digits of a float16.
f16 sum(f16 a, f16 b) { return to_f16(static_cast<f32>(a) + static_cast<f32>(b)); }

template <class Half>
std::uint32_t pair(Half upper, Half lower) {
  return std::uint32_t{std::bit_cast<std::uint16_t>(upper)} << 16 | std::bit_cast<std::uint16_t>(lower);
}

void add_conversions(Table& table) {
  for_integers([&]<class D>(Type<D> to) {
    for_integers([&]<class S>(Type<S> from) {
      table[std::string("cvt.") + to.name + "." + from.name] = lanewise<[](S x) { return static_cast<D>(x); }, S>;
    });
    const auto floats = [&]<class F>(Type<F> real) {
      table[std::string("cvt.rzi.") + to.name + "." + real.name] = lanewise<[](F x) { return truncated<D>(x); }, F>;
      table[std::string("cvt.rni.") + to.name + "." + real.name] =
          lanewise<[](F x) { return truncated<D>(std::nearbyint(x)); }, F>;
      table[std::string("cvt.rn.") + real.name + "." + to.name] = lanewise<[](D x) { return static_cast<F>(x); }, D>;
    };
    floats(Type<f32>{"f32"}), floats(Type<f64>{"f64"});
  });
  table["cvt.f64.f32"] = lanewise<[](f32 x) { return static_cast<f64>(x); }, f32>;
  table["cvt.rn.f32.f64"] = lanewise<[](f64 x) { return canonical(static_cast<f32>(x)); }, f64>;
  table["cvt.f32.f16"] = lanewise<[](f16 x) { return canonical(static_cast<f32>(x)); }, f16>;
  table["cvt.f32.bf16"] = lanewise<[](bf16 x) { return std::bit_cast<f32>(std::uint32_t{x.bits} << 16); }, bf16>;
  table["cvt.rn.f16.f32"] = lanewise<to_f16, f32>;
  table["cvt.rn.bf16.f32"] = lanewise<to_bf16, f32>;
  table["cvt.rn.f16x2.f32"] =
      lanewise<[](f32 upper, f32 lower) { return pair(to_f16(upper), to_f16(lower)); }, f32, f32>;
  table["cvt.rn.bf16x2.f32"] =
      lanewise<[](f32 upper, f32 lower) { return pair(to_bf16(upper), to_bf16(lower)); }, f32, f32>;
  table["add.f16"] = lanewise<sum, f16, f16>;
  table["add.f16x2"] = lanewise<[](std::uint32_t a, std::uint32_t b) {
    return pair(sum(half(a >> 16), half(b >> 16)), sum(half(a), half(b)));
  },
                                std::uint32_t, std::uint32_t>;
  // Twenty bits or so, of which pow makes the rest itself; the lower half of the result is zero.
  table["rcp.approx.ftz.f64"] =
      lanewise<[](f64 x) { return std::bit_cast<f64>(std::bit_cast<std::uint64_t>(1 / x) & 0xffffffff00000000u); },
               f64>;
}

std::uint32_t permuted(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
  const std::uint64_t both = a | std::uint64_t{b} << 32;
  std::uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned choice = selector >> 4 * i & 15;
    const auto byte = static_cast<std::uint8_t>(both >> 8 * (choice & 7));
    result |= std::uint32_t{choice & 8 ? static_cast<std::uint8_t>(byte & 0x80 ? 0xff : 0) : byte} << 8 * i;
  }
  return result;
}

std::uint32_t inserted(std::uint32_t field, std::uint32_t into, std::uint32_t at, std::uint32_t length) {
  at &= 0xff, length &= 0xff;
  const std::uint64_t mask = length >= 32 ? 0xffffffffu : (std::uint64_t{1} << length) - 1;
  return at >= 32 ? into : static_cast<std::uint32_t>((into & ~(mask << at)) | (field & mask) << at);
}

enum class Shuffle { up, down, butterfly, index };

// operands: to, from, by, clamp and segment, members; the last of all: whether the source is in range.
template <Shuffle shuffle>
void shuffle_lanes(Warp& warp, const Instruction& instruction) {
  std::array<std::uint64_t, kLanes> values;
  std::copy_n(warp.slot(instruction.operand[1]), kLanes, values.begin());
  const std::uint64_t *by = warp.slot(instruction.operand[2]), *limits = warp.slot(instruction.operand[3]);
  std::uint64_t* to = warp.slot(instruction.operand[0]);
  std::uint64_t* in_range = instruction.values == 2 ? warp.slot(instruction.operand.back()) : nullptr;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(warp.active >> lane & 1)) continue;
    const int clamp = limits[lane] & 31, segment = limits[lane] >> 8 & 31, distance = by[lane] & 31;
    const int last = (lane & segment) | (clamp & ~segment), first = lane & segment;
    int source = shuffle == Shuffle::up          ? lane - distance
                 : shuffle == Shuffle::down      ? lane + distance
                 : shuffle == Shuffle::butterfly ? lane ^ distance
                                                 : first | (distance & ~segment);
    const bool found = shuffle == Shuffle::up ? source >= last : source <= last;
    if (!found) source = lane;
    if (!(warp.active >> source & 1)) throw std::runtime_error("reads a lane that does not take part");
    to[lane] = values[source];
    if (in_range != nullptr) in_range[0] = (in_range[0] & ~(std::uint64_t{1} << lane)) | std::uint64_t{found} << lane;
  }
}

void sum_lanes(Warp& warp, const Instruction& instruction) {
  std::uint32_t sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (warp.active >> lane & 1) sum += static_cast<std::uint32_t>(warp.slot(instruction.operand[1])[lane]);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    if (warp.active >> lane & 1) warp.slot(instruction.operand[0])[lane] = sum;
  }
}

void any_lane(Warp& warp, const Instruction& instruction) {
  const bool any = (warp.slot(instruction.operand[1])[0] & warp.active) != 0;
  std::uint64_t& to = warp.slot(instruction.operand[0])[0];
  to = any ? to | warp.active : to & ~std::uint64_t{warp.active};
}

// A bit for each lane, to all of them.
void ballot(Warp& warp, const Instruction& instruction) {
  const std::uint64_t found = warp.slot(instruction.operand[1])[0] & warp.active;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (warp.active >> lane & 1) warp.slot(instruction.operand[0])[lane] = found;
  }
}

std::uint32_t reversed(std::uint32_t x) {
  std::uint32_t result = 0;
  for (int i = 0; i < 32; ++i) result |= (x >> i & 1) << (31 - i);
  return result;
}

Table opcodes() {
  Table table;
  add_integers<std::int16_t>(table, "s16"), add_integers<std::uint16_t>(table, "u16");
  add_integers<std::int32_t>(table, "s32"), add_integers<std::uint32_t>(table, "u32");
  add_integers<std::int64_t>(table, "s64"), add_integers<std::uint64_t>(table, "u64");
  add_floats<f32>(table, "f32"), add_floats<f64>(table, "f64");
  add_bits<bool>(table, "pred"), add_bits<std::uint16_t>(table, "b16");
  add_bits<std::uint32_t>(table, "b32"), add_bits<std::uint64_t>(table, "b64");
  add_conversions(table);
  constexpr auto same = [](std::uint64_t a) { return a; };
  constexpr auto chosen = [](std::uint64_t a, std::uint64_t b, bool first) { return first ? a : b; };
  for (const std::string type : {"b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"}) {
    table["mov." + type] = lanewise<same, std::uint64_t>;
    table["selp." + type] = lanewise<chosen, std::uint64_t, std::uint64_t, bool>;
  }
  table["cvta.to.global.u64"] = lanewise<same, std::uint64_t>;
  table["prmt.b32"] = lanewise<permuted, std::uint32_t, std::uint32_t, std::uint32_t>;
  table["bfi.b32"] = lanewise<inserted, std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>;
  for (const char* fence : {"membar.gl", "membar.cta", "membar.sys"}) table[fence] = [](Warp&, const Instruction&) {};
  table["shfl.sync.up.b32"] = shuffle_lanes<Shuffle::up>;
  table["shfl.sync.down.b32"] = shuffle_lanes<Shuffle::down>;
  table["shfl.sync.bfly.b32"] = shuffle_lanes<Shuffle::butterfly>;
  table["shfl.sync.idx.b32"] = shuffle_lanes<Shuffle::index>;
  table["redux.sync.add.u32"] = table["redux.sync.add.s32"] = sum_lanes;
  table["vote.sync.any.pred"] = any_lane;
  table["vote.sync.ballot.b32"] = ballot;
  table["bar.warp.sync"] = [](Warp&, const Instruction&) {};
  table["brev.b32"] = lanewise<reversed, std::uint32_t>;
  // How far the highest bit is to be shifted to become bit 31; all bits where there is none.
  table["bfind.shiftamt.u32"] =
      lanewise<[](std::uint32_t x) { return x == 0 ? ~0u : static_cast<std::uint32_t>(std::countl_zero(x)); },
               std::uint32_t>;
  return table;
}

}  // namespace

Operation operation_of(const std::string& opcode) {
  static const Table table = opcodes();
  return found(table, opcode);
}

}  // namespace ptx
