// Text from parts. No XLA headers: kernels may include this.
#pragma once

#include <sstream>
#include <string>

namespace xla_gpu {

template <typename... Parts>
std::string StrCat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

}  // namespace xla_gpu
