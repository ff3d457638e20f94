// Biases as integer kernels hold them: int32 on the grid of the products that they are added to (docs/numerics.md,
// section 6). The scale is a product of float32 scales, in float32 as runtimes make it; all else is float64, in which
// an int32 grid is exact.
#pragma once

#include <cstdint>

#include "qsim/fake_quantize.h"

namespace qsim {

struct QuantizedBias {
  double value;
  bool in_range;
};

// The product of two scales may be too small for float32, and 0 then: on such a grid there is 0 alone, which 0 is on.
QSIM_HD QuantizedBias fake_quantize_bias(double bias, float input_scale, float weight_scale) {
  const float scale = input_scale * weight_scale;
  const Grid<double> grid{scale, -0x1p31, 0x1p31 - 1};
  const double steps = quotient<Rounding::divide>(bias, static_cast<double>(scale > 0 ? scale : 0x1p-149f));
  return {dequantize(nearest_steps(steps, grid), grid.scale), in_range(steps, grid)};
}

}  // namespace qsim
