#include <torch/library.h>

#include <string>

#include "schema/tags.h"

// Scales from the tensor itself. element: "int2" .. "int16" or a float format; scale_format: "float8_e8m0fnu" or
// "float8_e4m3fn", None for float32.
TORCH_LIBRARY_FRAGMENT(qsim, m) {
  const std::string groups = "*, int? axis=None, int? block_size=None, ";
  const std::string scales = "float min_scale=0.0, str? scale_format=None, str scale_rounding=\"floor\"";
  const auto def = [&](const std::string& schema) { m.def(schema.c_str(), qsim::kAnyLayout); };
  def("choose_block_scale(Tensor lowest, Tensor highest, str element, str scale_format, *, "
      "str scale_rounding=\"floor\") -> Tensor");
  def("fake_quantize_dynamic(Tensor x, int quant_min, int quant_max, " + groups +
      "bool symmetric=False, str rounding=\"divide\", " + scales + ") -> Tensor");
  def("round_to_format_dynamic(Tensor x, str format, " + groups + "bool? saturate=None, " + scales + ") -> Tensor");
}
