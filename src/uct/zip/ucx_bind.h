// SPDX-License-Identifier: BSD-3-Clause
// Binds the plugin to the one copy of UCX that is loading it, whatever that copy's files are
// called.
//
// The plugin is linked against no UCX library. Each UCX function it calls is a stub of its own that
// jumps through a table, and bind() fills the table from the very objects that called the plugin.
// So one binary serves a system UCX, a Python wheel's hashed file names, and processes that hold
// several copies of UCX.
#ifndef ZIP_UCX_BIND_H
#define ZIP_UCX_BIND_H

#include "uct/zip/ucx_abi.h"

extern "C" {
#include <ucs/config/global_opts.h>
#include <ucs/debug/log_def.h>
}

#include <string>

namespace zip::ucx {

// Objects of UCX, as opposed to functions: reached by pointer, valid after bind().
#define ZIP_UCX_DATA(library, type, name) extern type *name##_p;
#include "uct/zip/ucx_symbols.h"

// Finds the libucs that contains `caller`, an address inside it, and the libuct loaded with it, and
// fills the table. Returns false with one line in `why`, and leaves no UCX function callable, if
// that fails. Not thread-safe: called from the module constructor, which UCX runs once.
bool bind(const void *caller, std::string &why);

// Whether `caller` lies in the libucs that bind() chose. False before bind().
bool bound_to(const void *caller);

// Replaces the stubs in an option table by UCX's own functions: its parser tells kinds of options
// apart by comparing their addresses. After bind().
void use_own_parsers(ucs_config_field_t *table);

// Path of the libuct that bind() chose, for messages.
const char *library_path();

// Address of an optional function of ucx_symbols.h, or NULL if this UCX has none.
#define ZIP_UCX_OPTIONAL(library, name) void *name##_address();
#include "uct/zip/ucx_symbols.h"

} // namespace zip::ucx

// UCX's own log, at the user's UCX_LOG_LEVEL. ERROR and WARN are shown by default.
#define zip_log(_level, ...)                                                                       \
    do {                                                                                           \
        if ((_level) <= zip::ucx::ucs_global_opts_p->log_component.log_level) {                    \
            ucs_log_dispatch(__FILE__, __LINE__, __func__, (_level),                               \
                             &zip::ucx::ucs_global_opts_p->log_component, __VA_ARGS__);            \
        }                                                                                          \
    } while (0)
#define zip_error(...) zip_log(UCS_LOG_LEVEL_ERROR, __VA_ARGS__)
#define zip_warn(...) zip_log(UCS_LOG_LEVEL_WARN, __VA_ARGS__)
#define zip_info(...) zip_log(UCS_LOG_LEVEL_INFO, __VA_ARGS__)
#define zip_debug(...) zip_log(UCS_LOG_LEVEL_DEBUG, __VA_ARGS__)

#endif
