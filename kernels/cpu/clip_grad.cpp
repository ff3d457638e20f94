// Gradient norms and their clipping. The bindings call it through clip_grad_kernels(): chunks of the gradients on any
// thread, whose sums they join in a fixed order.
#include "qsim/clip_grad.h"

#include <cfloat>

#include "vector/convert.h"
#include "vector/sums.h"

namespace qsim::cpu {

namespace {

QSIM_INLINE Doubles magnitude(Doubles x) { return (Doubles)((Longs)x & 0x7fffffffffffffff); }

// How an element joins a sum. Sum and squares of a non-finite element stay non-finite: `shows` says whether that is so.
struct Squares {
  static constexpr bool shows = true;
  QSIM_INLINE Doubles operator()(Doubles sum, Doubles x) const { return sum + x * x; }
  QSIM_INLINE double join(double a, double b) const { return a + b; }
};
struct Magnitudes {
  static constexpr bool shows = true;
  QSIM_INLINE Doubles operator()(Doubles sum, Doubles x) const { return sum + magnitude(x); }
  QSIM_INLINE double join(double a, double b) const { return a + b; }
};
struct Largest {
  static constexpr bool shows = false;
  QSIM_INLINE Doubles operator()(Doubles sum, Doubles x) const { return magnitude(x) > sum ? magnitude(x) : sum; }
  QSIM_INLINE double join(double a, double b) const { return a > b ? a : b; }
};
struct Powers {
  double p;
  static constexpr bool shows = false;
  QSIM_INLINE Doubles operator()(Doubles sum, Doubles x) const {
    for (int i = 0; i < kDoubles; ++i) sum[i] += pow(fabs(x[i]), p);
    return sum;
  }
  QSIM_INLINE double join(double a, double b) const { return a + b; }
};

// `masked`: elements that are not finite are counted and left out.
template <bool masked, class T, class Term>
QSIM_INLINE GradSum sum_elements(const T* x, std::int64_t n, Term term) {
  Sixteen sums;
  Longs others{};
  const auto add = [&](Sixteen elements) QSIM_INLINE_LAMBDA {
    for (int j = 0; j < Sixteen::kRegisters; ++j) {
      Doubles e = elements.part[j];
      if constexpr (masked) {
        const Longs finite = magnitude(e) <= DBL_MAX;
        others += finite + 1;
        e = (Doubles)((Longs)e & finite);
      }
      sums.part[j] = term(sums.part[j], e);
    }
  };
  for_each_sixteen(n, add, x);
  GradSum total;
  for (int i = 0; i < Sixteen::kCount; ++i) total.power = term.join(total.power, sums[i]);
  for (int i = 0; i < kDoubles; ++i) total.nonfinite += others[i];
  return total;
}

template <class T, class Term>
GradSum sum_finite(const T* x, std::int64_t n, Term term) {
  if constexpr (Term::shows) {
    const GradSum optimistic = sum_elements<false>(x, n, term);
    if (fabs(optimistic.power) <= DBL_MAX) return optimistic;
  }
  return sum_elements<true>(x, n, term);
}

template <class T>
GradSum sum(const void* x, std::int64_t n, double p) {
  const T* elements = static_cast<const T*>(x);
  if (p == 2) return sum_finite(elements, n, Squares{});
  if (p == 1) return sum_finite(elements, n, Magnitudes{});
  if (p == INFINITY) return sum_finite(elements, n, Largest{});
  return sum_finite(elements, n, Powers{p});
}

template <class T>
QSIM_INLINE void scale_register(T* x, float coefficient, bool finite_only) {
  Floats v = load(x);
  if (finite_only) v = (Floats)((Words)v & (Words)((Floats)((Words)v & 0x7fffffff) <= FLT_MAX));
  round_finite_to(x, v * coefficient);
}

template <class T>
void scale(void* x, std::int64_t n, double coefficient, bool finite_only) {
  T* elements = static_cast<T*>(x);
  const float factor = static_cast<float>(coefficient);
  const std::int64_t whole = n - n % kFloats;
  for (std::int64_t i = 0; i < whole; i += kFloats) scale_register(elements + i, factor, finite_only);
  if (whole < n) {
    T rest[kFloats] = {};
    const auto bytes = static_cast<std::size_t>(n - whole) * sizeof(T);
    std::memcpy(rest, elements + whole, bytes);
    scale_register(rest, factor, finite_only);
    std::memcpy(elements + whole, rest, bytes);
  }
}

template <>
void scale<double>(void* x, std::int64_t n, double coefficient, bool finite_only) {
  double* elements = static_cast<double*>(x);
  for (std::int64_t i = 0; i < n; ++i) {
    const double e = elements[i];
    elements[i] = finite_only && !(fabs(e) <= DBL_MAX) ? 0 : e * coefficient;
  }
}

}  // namespace

namespace QSIM_LEVEL {
const ClipGradKernels clip_grad_kernels = {by_element<SumGrad>([]<class T>() { return sum<T>; }),
                                           by_element<ScaleGrad>([]<class T>() { return scale<T>; })};
}  // namespace QSIM_LEVEL

}  // namespace qsim::cpu
