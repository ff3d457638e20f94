// What torch may assume of the operators (ATen/core/enum_tag.h; tests/python/ops/test_operator_tags.py holds it). All
// work under torch.compile and torch.export. Which strides Inductor may give their arguments in place of those of the
// eager call:
#pragma once

#include <ATen/core/enum_tag.h>

#include <vector>

namespace qsim {

// Any: no value depends on them.
inline const std::vector<at::Tag> kAnyLayout{at::Tag::pt2_compliant_tag, at::Tag::flexible_layout};

// No others: the bits of a mask and the terms of a sum are in memory order, and a state has to be contiguous.
inline const std::vector<at::Tag> kExactLayout{at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};

}  // namespace qsim
