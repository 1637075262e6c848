// SPDX-License-Identifier: BSD-3-Clause
// Where UCX enters the plugin: bind to the UCX that is loading it, check its layout, register.
#include "uct/zip/ucx_guard.h"
#include "uct/zip/zip_iface.h"

#include <cstdio>
#include <string>

namespace {

bool registered;

// Before binding there is no UCX log to write to.
ucs_status_t refuse(const char *why)
{
    fprintf(stderr, "zip: not used: %s\n", why);
    return UCS_ERR_UNSUPPORTED;
}

// The rings that registration linked static objects of this plugin into outlive it when a process
// ends, or unloads it.
__attribute__((destructor)) void unregister()
{
    if (registered) {
        registered = false;
        uct_tl_unregister(&zip::tl);
        uct_component_unregister(&zip::component);
        ucs_list_del(&zip::component.list);
    }
}

} // namespace

// UCX calls this after dlopen; anything but UCS_OK makes it unload the plugin and go on without.
extern "C" __attribute__((visibility("default"))) ucs_status_t ucs_module_global_init(void)
{
    const void *caller = __builtin_return_address(0);
    std::string why;
    if (registered) {
        if (zip::ucx::bound_to(caller)) {
            return UCS_OK;
        }
        return refuse("another copy of UCX in this process is using the plugin already; give this "
                      "one a copy of the "
                      "plugin file in a folder of its own");
    }
    if (!zip::ucx::bind(caller, why)) {
        return refuse(why.c_str());
    }
    if (!zip::ucx::layout_matches(why)) {
        zip_warn("zip: not used: %s is not laid out as this plugin expects: %s",
                 zip::ucx::library_path(), why.c_str());
        return UCS_ERR_UNSUPPORTED;
    }
    zip::init_component();
    zip::init_tl();
    uct_component_register(&zip::component);
    uct_tl_register(&zip::component, &zip::tl);
    registered = true;
    zip_debug("zip: registered with %s", zip::ucx::library_path());
    return UCS_OK;
}
