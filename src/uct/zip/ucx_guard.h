// SPDX-License-Identifier: BSD-3-Clause
// The load-time test of ucx_abi.h against the UCX that loads the plugin.
#ifndef ZIP_UCX_GUARD_H
#define ZIP_UCX_GUARD_H

#include <string>

namespace zip::ucx {

// Tests ucx_abi.h against the libuct that bind() chose, without registering anything and without
// being able to fault on a layout that differs. True if all agrees; otherwise false with one line
// in `why` that names the first difference. To be called after bind() and before anything is
// registered; safe while other threads use UCX. The few fields that libuct only passes on between
// its users cannot be tested: test/guard/run_mutations.sh lists them.
bool layout_matches(std::string &why);

} // namespace zip::ucx

#endif
