#include "weight_rows.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "launch.h"
#include "qsim/cuda/weight_rows.h"

namespace qsim {
namespace {

using at::Tensor;
using OptionalName = std::optional<std::string_view>;

cuda::WeightRows shape_of(const Tensor& rows) {
  TORCH_CHECK_VALUE(rows.size(0) * rows.size(1) <= INT32_MAX && rows.size(2) <= INT32_MAX, "qsim_restoration: rows of ",
                    rows.sizes(), "; expected fewer than 2^31 rows and columns");
  return {static_cast<unsigned>(rows.size(0) * rows.size(1)), static_cast<unsigned>(rows.size(1)), rows.size(2)};
}

template <class T>
void descend(const Tensor& rows, const Tensor& pull, const Tensor& moments, const RowGrids& grids,
             std::int64_t rounds) {
  const Tensor power = moments.diagonal(0, 1, 2).contiguous();
  const auto format = grids.format_in<T>();
  const DescentRow<T> first{rows.size(2),
                            rows.mutable_data_ptr<T>(),
                            pull.mutable_data_ptr<T>(),
                            grids.of<T>(0, 0, rows.size(2), format),
                            moments.const_data_ptr<T>(),
                            power.const_data_ptr<T>()};
  check_launch(cuda::descend(shape_of(rows), first, rounds, current_stream()));
}

void descend_cuda(Tensor& rows, Tensor& pull, const Tensor& moments, const Tensor& step, const Tensor& low,
                  const Tensor& high, std::int64_t rounds, OptionalName format) {
  const RowGrids grids{step, low, high, format};
  check_descent(rows, pull, moments, grids);
  if (rows.numel() == 0) return;
  const c10::cuda::CUDAGuard guard(rows.device());
  if (rows.scalar_type() == at::kFloat) {
    descend<float>(rows, pull, moments, grids, rounds);
  } else {
    descend<double>(rows, pull, moments, grids, rounds);
  }
}

template <class T>
void feed_back(const Tensor& rows, const Tensor& errors, const Tensor& target, const Tensor& factor,
               const RowGrids& grids, std::int64_t begin) {
  const auto format = grids.format_in<T>();
  const FeedbackRow<T> first{errors.size(2),
                             target.const_data_ptr<T>(),
                             rows.mutable_data_ptr<T>(),
                             errors.mutable_data_ptr<T>(),
                             grids.of<T>(0, 0, rows.size(2), format),
                             factor.const_data_ptr<T>(),
                             rows.size(2)};
  check_launch(cuda::feed_back(shape_of(rows), first, begin, current_stream()));
}

Tensor feed_back_cuda(Tensor& rows, const Tensor& target, const Tensor& factor, const Tensor& step, const Tensor& low,
                      const Tensor& high, std::int64_t begin, std::int64_t end, OptionalName format) {
  const RowGrids grids{step, low, high, format};
  check_feedback(rows, target, factor, grids, begin, end);
  const c10::cuda::CUDAGuard guard(rows.device());
  const Tensor errors = at::empty({rows.size(0), rows.size(1), end - begin}, rows.options());
  if (errors.numel() == 0) return errors;
  if (rows.scalar_type() == at::kFloat) {
    feed_back<float>(rows, errors, target, factor, grids, begin);
  } else {
    feed_back<double>(rows, errors, target, factor, grids, begin);
  }
  return errors;
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim_restoration, CUDA, m) {
  m.impl("descend_", descend_cuda);
  m.impl("feed_back_", feed_back_cuda);
}
}  // namespace qsim
