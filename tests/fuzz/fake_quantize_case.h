// A call of the fake-quantize kernels, and its scalar twin after docs/numerics.md, section 1.
#pragma once

#include <algorithm>

#include "input.h"
#include "qsim/fake_quantize.h"

namespace fuzz {

using qsim::Layout;
using qsim::Rounding;

// The parameter of an element, read off the definition of Layout.
inline std::int64_t parameter_of(std::int64_t e, const Layout& layout) {
  const std::int64_t segments = (layout.outer + layout.segment - 1) / layout.segment;
  const std::int64_t inside = e % layout.outer, segment = e / layout.outer * segments + inside / layout.segment;
  return segment * layout.width + inside % layout.segment / layout.run % layout.width;
}

template <class A>
struct Encoding {
  A scale;
  double zero_point;  // an integer, or NaN
};

template <class T>
struct FakeQuantizeCase {
  using A = arithmetic_t<T>;

  explicit FakeQuantizeCase(Input& input) {
    rounding = input.flip() ? Rounding::divide : Rounding::reciprocal;
    choose_layout(input);
    choose_grid(input);
    const std::int64_t parameters = parameter_of(n - 1, layout) / layout.width * layout.width + layout.width;
    learned = input.bits(1) % 4 == 0;
    const A scale = input.positive<A>();
    for (std::int64_t i = 0; i < parameters; ++i) {
      scales.push_back(input.bits(1) % 4 ? scale : input.positive<A>());
      zero_points.push_back(input.between(quant_min, quant_max));
      const A from = static_cast<A>(zero_points.back()) + input.pick({A(0), A(0.5), A(-0.5), A(0.3), A(1e9), A(NAN)});
      learned_zero_points.push_back(from);
      const double rounded = std::clamp<double>(std::nearbyint(from), quant_min, quant_max);
      encodings.push_back({scales.back(), !learned ? zero_points.back() : std::isnan(from) ? NAN : rounded});
    }
    x = input.elements<T>(n, scale);
  }

  // What the bindings prepare: grids in steps, written out `run` x `rows` times where channels alternate quickly.
  qsim::cpu::Grids<A> grids(const qsim::cpu::PrepareGrids<A>& kernels, qsim::cpu::Bounds bounds) {
    const auto count = static_cast<std::int64_t>(scales.size());
    const auto low = static_cast<A>(quant_min), high = static_cast<A>(quant_max);
    qsim::cpu::Grids<A> once = arrays(prepared, count);
    once.regular = learned ? kernels.learned(scales.data(), learned_zero_points.data(), count, low, high, bounds, once)
                           : kernels.integer(scales.data(), zero_points.data(), count, low, high, bounds, once);
    if (rows == 0) return once;
    qsim::cpu::Grids<A> table = arrays(repeated, count * layout.run * rows);
    table.regular = once.regular;
    kernels.repeat(once, count, layout.run, rows, table);
    return table;
  }

  Layout kernel_layout() const {
    if (rows == 0) return layout;
    return {layout.outer, layout.segment, static_cast<std::int64_t>(scales.size()) * layout.run * rows, 1};
  }

  Encoding<A> encoding(std::int64_t e) const { return encodings[static_cast<std::size_t>(parameter_of(e, layout))]; }

  A quotient(A value, A scale) const { return rounding == Rounding::divide ? value / scale : value * (1 / scale); }

  double level_of(A value, Encoding<A> by) const { return std::nearbyint(quotient(value, by.scale)) + by.zero_point; }

  bool inside(std::int64_t e) const {
    const double level = level_of(widened(x[static_cast<std::size_t>(e)]), encoding(e));
    return quant_min <= level && level <= quant_max;
  }

  T expected(std::int64_t e) const {
    const Encoding<A> by = encoding(e);
    const double level = level_of(widened(x[static_cast<std::size_t>(e)]), by);
    if (std::isnan(level)) return narrowed<T>(NAN);
    const double steps = std::clamp<double>(level, quant_min, quant_max) - by.zero_point;
    const T y = narrowed<T>(static_cast<A>(steps) * by.scale);
    return widened(y) == 0 ? T{} : y;
  }

  Layout layout;
  std::int64_t n, rows = 0;  // rows > 0: the table of grids is repeated
  Rounding rounding;
  std::int32_t quant_min, quant_max;
  bool learned;
  std::vector<A> scales, learned_zero_points;
  std::vector<std::int32_t> zero_points;
  std::vector<Encoding<A>> encodings;
  std::vector<T> x;

 private:
  void choose_layout(Input& input) {
    const std::int64_t channels = input.between(1, 9), inner = input.between(1, 90), times = input.between(1, 6);
    switch (input.bits(1) % 5) {
      case 0:
        n = inner * times;
        layout = {n, n, 1, n};
        break;
      case 1:
        n = channels * inner;
        layout = {n, inner, 1, inner};
        break;
      case 2:
        n = times * channels * inner;
        layout = {n, n, channels, inner};
        break;
      case 3:
        n = 8 * times * channels;
        layout = {n, n, channels, std::min<std::int64_t>(inner, 8)};
        n = layout.outer = layout.segment = 8 * times * channels * layout.run;
        rows = input.between(1, static_cast<int>(8 * times));
        break;
      default: {
        const std::int64_t length = input.between(1, 70), block = input.between(1, static_cast<int>(length));
        const std::int64_t columns = input.flip() ? 1 : channels;
        n = times * length * columns;
        layout = {length * columns, block * columns, columns, 1};
      }
    }
  }

  void choose_grid(Input& input) {
    const int steps = (1 << input.pick({2, 4, 8, 16, 24})) - 1;
    quant_min = input.pick({0, -(steps / 2) - 1, -steps / 2, -steps, -3});
    quant_max = quant_min + steps;
    if (quant_max > 1 << 24) quant_max = 1 << 24;
  }

  static qsim::cpu::Grids<A> arrays(std::vector<A>& storage, std::int64_t n) {
    storage.assign(static_cast<std::size_t>(qsim::cpu::Grids<A>::kArrays * n), A(0));
    A* const first = storage.data();
    return {first, first + n, first + 2 * n, first + 3 * n, first + 4 * n, first + 5 * n};
  }

  std::vector<A> prepared, repeated;
};

inline const qsim::cpu::PrepareGrids<float>& prepare(const qsim::cpu::FakeQuantizeKernels& table, float) {
  return table.prepare_f32;
}
inline const qsim::cpu::PrepareGrids<double>& prepare(const qsim::cpu::FakeQuantizeKernels& table, double) {
  return table.prepare_f64;
}

}  // namespace fuzz
