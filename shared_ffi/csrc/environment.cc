#include "environment.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "str_cat.h"

namespace xla_gpu {

Choice::Choice(const char* what, const char* variable, const char* where,
               std::vector<std::string> names)
    : what_(what), variable_(variable), where_(where), names_(std::move(names)) {
  const char* value = std::getenv(variable);
  if (value != nullptr && *value != 0) error_ = Choose(value);
}

std::string Choice::Choose(const std::string& name) {
  const auto found = std::find(names_.begin(), names_.end(), name);
  if (found != names_.end()) {
    index_ = found - names_.begin();
    return "";
  }
  std::string list;
  for (const std::string& other : names_) list += (list.empty() ? "" : ", ") + other;
  return StrCat(what_, " (", variable_, ") must be one of ", list, where_, "; got ", name,
                ". Unset it for ", names_[0]);
}

}  // namespace xla_gpu
