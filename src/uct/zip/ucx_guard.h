// SPDX-License-Identifier: BSD-3-Clause
// The load-time test of ucx_abi.h against the UCX that loads the plugin.
#ifndef ZIP_UCX_GUARD_H
#define ZIP_UCX_GUARD_H

#include <string>

namespace zip::ucx {

// Tests every declaration of ucx_abi.h against the libuct that bind() chose, without registering
// anything and without being able to fault on a layout that differs. True if all agree; otherwise
// false with one line in `why` that names the first difference. To be called once, after bind() and
// before anything is registered.
bool layout_matches(std::string &why);

} // namespace zip::ucx

#endif
