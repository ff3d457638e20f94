// qsim_cpu::descend_ and feed_back_, which qsim.restoration calls for weights on the CPU; on other devices it computes
// the same with torch's operators. So they are no operators of namespace qsim, all of which every device has.
#include "qsim/weight_rows.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "described.h"
#include "memory.h"

namespace qsim {
namespace {

using at::Tensor;

// What an operator checks of tensors that have to fit to `rows`, [groups, rows, columns].
struct Expected {
  const char* op;
  const Tensor& rows;

  void check_rows() const {
    TORCH_CHECK_VALUE(rows.dim() == 3 && (rows.scalar_type() == at::kFloat || rows.scalar_type() == at::kDouble), op,
                      ": rows is ", described(rows), "; expected float32 or float64 of shape [groups, rows, columns]");
    check("rows", rows, rows.sizes());
  }
  void check(const char* name, const Tensor& x, at::IntArrayRef shape) const {
    TORCH_CHECK_VALUE(x.sizes() == shape && x.is_contiguous() && x.scalar_type() == rows.scalar_type() && x.is_cpu(),
                      op, ": ", name, " is ", described(x), "; expected a contiguous ", described(rows.scalar_type()),
                      " of shape ", shape, " on cpu");
  }
  void check_grid(const Tensor& step, const Tensor& low, const Tensor& high) const {
    const std::int64_t width = step.dim() == 3 && step.size(2) == 1 ? 1 : rows.size(2);
    check("step", step, {rows.size(0), rows.size(1), width});
    check("low", low, {rows.size(0), rows.size(1), width});
    check("high", high, {rows.size(0), rows.size(1), width});
  }
  void check_square(const char* name, const Tensor& x) const {
    check(name, x, {rows.size(0), rows.size(2), rows.size(2)});
  }
};

// The grid of row `i` of all, from its column `begin` on.
template <class T>
cpu::RowGrid<T> grid_of(const Tensor& step, const Tensor& low, const Tensor& high, std::int64_t i, std::int64_t begin,
                        std::int64_t columns) {
  const std::int64_t width = step.size(2), stride = columns == width ? 1 : 0, at = i * width + begin * stride;
  return {step.const_data_ptr<T>() + at, low.const_data_ptr<T>() + at, high.const_data_ptr<T>() + at, stride};
}

template <class T>
void descend(const Tensor& rows, const Tensor& pull, const Tensor& moments, const Tensor& step, const Tensor& low,
             const Tensor& high, std::int64_t rounds, void (*kernel)(const cpu::DescentRow<T>&, std::int64_t)) {
  const std::int64_t groups = rows.size(0), count = rows.size(1), columns = rows.size(2);
  const Tensor power = moments.diagonal(0, 1, 2).contiguous();
  T *numbers = rows.mutable_data_ptr<T>(), *pulls = pull.mutable_data_ptr<T>();
  const T *matrices = moments.const_data_ptr<T>(), *powers = power.const_data_ptr<T>();
  at::parallel_for(0, groups * count, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t group = i / count;
      kernel({columns, numbers + i * columns, pulls + i * columns, grid_of<T>(step, low, high, i, 0, columns),
              matrices + group * columns * columns, powers + group * columns},
             rounds);
    }
  });
}

void descend_(Tensor& rows, Tensor& pull, const Tensor& moments, const Tensor& step, const Tensor& low,
              const Tensor& high, std::int64_t rounds) {
  constexpr const char* kOp = "qsim_cpu::descend_";
  const Expected expected{kOp, rows};
  expected.check_rows();
  expected.check("pull", pull, rows.sizes());
  expected.check_square("moments", moments);
  expected.check_grid(step, low, high);
  check_memory(kOp, {{"rows", rows}, {"pull", pull}},
               {{"moments", moments}, {"step", step}, {"low", low}, {"high", high}});
  if (rows.numel() == 0) return;
  const auto& kernels = cpu::weight_row_kernels();
  if (rows.scalar_type() == at::kFloat) {
    descend<float>(rows, pull, moments, step, low, high, rounds, kernels.descend_f32);
  } else {
    descend<double>(rows, pull, moments, step, low, high, rounds, kernels.descend_f64);
  }
}

template <class T>
void feed_back(const Tensor& rows, const Tensor& errors, const Tensor& target, const Tensor& factor, const Tensor& step,
               const Tensor& low, const Tensor& high, std::int64_t from, void (*kernel)(const cpu::FeedbackRow<T>&)) {
  const std::int64_t count = rows.size(1), columns = rows.size(2), n = errors.size(2);
  T *numbers = rows.mutable_data_ptr<T>(), *left = errors.mutable_data_ptr<T>();
  const T *targets = target.const_data_ptr<T>(), *factors = factor.const_data_ptr<T>();
  at::parallel_for(0, rows.size(0) * count, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t at = i * columns + from;
      kernel({n, targets + at, numbers + at, left + i * n, grid_of<T>(step, low, high, i, from, columns),
              factors + (i / count * columns + from) * columns + from, columns});
    }
  });
}

Tensor feed_back_(Tensor& rows, const Tensor& target, const Tensor& factor, const Tensor& step, const Tensor& low,
                  const Tensor& high, std::int64_t begin, std::int64_t end) {
  constexpr const char* kOp = "qsim_cpu::feed_back_";
  const Expected expected{kOp, rows};
  expected.check_rows();
  expected.check("target", target, rows.sizes());
  expected.check_square("factor", factor);
  expected.check_grid(step, low, high);
  TORCH_CHECK_VALUE(0 <= begin && begin <= end && end <= rows.size(2), kOp, ": begin is ", begin, ", end ", end,
                    "; expected 0 <= begin <= end <= ", rows.size(2), ", the columns that there are");
  check_memory(kOp, {{"rows", rows}},
               {{"target", target}, {"factor", factor}, {"step", step}, {"low", low}, {"high", high}});
  const Tensor errors = at::empty({rows.size(0), rows.size(1), end - begin}, rows.options());
  if (errors.numel() == 0) return errors;
  const auto& kernels = cpu::weight_row_kernels();
  if (rows.scalar_type() == at::kFloat) {
    feed_back<float>(rows, errors, target, factor, step, low, high, begin, kernels.feed_back_f32);
  } else {
    feed_back<double>(rows, errors, target, factor, step, low, high, begin, kernels.feed_back_f64);
  }
  return errors;
}

}  // namespace

TORCH_LIBRARY(qsim_cpu, m) {
  m.def(
      "descend_(Tensor(a!) rows, Tensor(b!) pull, Tensor moments, Tensor step, Tensor low, Tensor high, int rounds) "
      "-> ()");
  m.def(
      "feed_back_(Tensor(a!) rows, Tensor target, Tensor factor, Tensor step, Tensor low, Tensor high, int begin, "
      "int end) -> Tensor");
}
TORCH_LIBRARY_IMPL(qsim_cpu, CPU, m) {
  m.impl("descend_", descend_);
  m.impl("feed_back_", feed_back_);
}
}  // namespace qsim
