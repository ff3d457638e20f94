// All values of an enum that name_of(value) has a name for: they follow each other from 0. Where name_of is a switch,
// the compiler asks for the name of a new one, and whatever goes over these has it then. The compiler's option that
// hides symbols does not reach templates of variables.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

namespace qsim {

template <class E>
consteval std::size_t count_named() {
  std::size_t count = 0;
  while (!name_of(static_cast<E>(count)).empty()) ++count;
  return count;
}

template <class E>
consteval auto all_named() {
  std::array<E, count_named<E>()> all{};
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<E>(i);
  return all;
}
template <class E>
[[gnu::visibility("hidden")]] inline constexpr auto kAll = all_named<E>();

template <class E>
consteval auto all_names() {
  std::array<std::string_view, count_named<E>()> names;
  for (std::size_t i = 0; i < names.size(); ++i) names[i] = name_of(static_cast<E>(i));
  return names;
}
template <class E>
[[gnu::visibility("hidden")]] inline constexpr auto kNames = all_names<E>();

}  // namespace qsim
