// Which builds of the kernels there are, and which of them this machine can run.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace tailrace {

// Names of the kernel builds that this machine can run, best first; the last one is always "portable".
std::vector<std::string> available();

// The build of that name. Throws std::invalid_argument where it is none of `available()`.
const Kernels *chosen(const std::string &name);

} // namespace tailrace
