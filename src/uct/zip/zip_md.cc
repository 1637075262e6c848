// SPDX-License-Identifier: BSD-3-Clause
// Memory domain: choice of the transport below, registration, remote keys.
#include "uct/zip/zip_md.h"

#include <sys/random.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace zip {

ucx::Component component;
static ucx::MdOps md_ops;

ucs_config_field_t md_options_table[] = {
        {"TLS", "auto",
         "Transports to put compressed data on, best first; the first one that has a device here "
         "is used.\n"
         "\"auto\" takes rc_mlx5, rc_verbs, tcp, posix and sysv in this order, and if UCX_TLS "
         "lists transports,\n"
         "only those listed there.",
         ucs_offsetof(MdOptions, transports), UCS_CONFIG_TYPE_STRING},

        {"MEM_TYPES", "cuda",
         "Memory types to compress. This build serves host only. Host memory has to be named, "
         "because the transport\n"
         "then takes part in all large transfers of host memory.",
         ucs_offsetof(MdOptions, mem_types),
         UCS_CONFIG_TYPE_BITMAP(nullptr)}, // names: init_component()

        {nullptr, nullptr, nullptr, 0, {}}};

constexpr uint64_t SERVED_MEM_TYPES = UCS_BIT(UCS_MEMORY_TYPE_HOST);
constexpr char MD_PREFIX[] = "zip_"; // of domain names, before the name of the domain below

uint64_t random_id()
{
    uint64_t id = 0;
    while (id == 0) {
        if (getrandom(&id, sizeof(id), 0) != sizeof(id) && errno != EINTR) {
            zip_error("zip: no random numbers: %s", strerror(errno));
            abort();
        }
    }
    return id;
}

namespace {

struct ConfigDeleter {
    void operator()(void *config) const { uct_config_release(config); }
};
using ConfigPtr = std::unique_ptr<void, ConfigDeleter>;

struct MdDeleter {
    void operator()(uct_md_h md) const { uct_md_close(md); }
};
using MdPtr = std::unique_ptr<uct_md, MdDeleter>;

std::vector<std::string> split(const char *list)
{
    std::vector<std::string> names;
    std::string name;
    for (const char *c = list;; ++c) {
        if (*c == ',' || *c == 0) {
            if (!name.empty()) {
                names.push_back(name);
            }
            name.clear();
            if (*c == 0) {
                return names;
            }
        } else if (*c != ' ') {
            name += *c;
        }
    }
}

// Whether a list such as UCX_TLS's names transport `name`, by itself or by one of UCX's group
// names.
bool lists(const std::vector<std::string> &tls, const std::string &name)
{
    static const struct {
        const char *group;
        const char *members; // with a comma before and after each
    } groups[] = {
            {"rc", ",rc_mlx5,rc_verbs,"}, {"rc_x", ",rc_mlx5,"},   {"rc_v", ",rc_verbs,"},
            {"ib", ",rc_mlx5,rc_verbs,"}, {"shm", ",posix,sysv,"}, {"sm", ",posix,sysv,"},
            {"mm", ",posix,sysv,"},
    };
    for (const std::string &entry : tls) {
        if (entry == name || entry == "\\" + name || entry == "all") {
            return true;
        }
        for (const auto &group : groups) {
            if (entry == group.group &&
                strstr(group.members, ("," + name + ",").c_str()) != nullptr) {
                return true;
            }
        }
    }
    return false;
}

// Transport names to try, in order.
std::vector<std::string> candidates(const char *option)
{
    if (strcmp(option, "auto") != 0) {
        return split(option);
    }
    std::vector<std::string> names{"rc_mlx5", "rc_verbs", "tcp", "posix", "sysv"};
    const char *env = getenv("UCX_TLS");
    if (env == nullptr || env[0] == 0 || env[0] == '^') {
        return names;
    }
    const std::vector<std::string> tls = split(env);
    std::erase_if(names, [&tls](const std::string &name) { return !lists(tls, name); });
    return names;
}

// The component that has transport `name`, or NULL.
ucx::Component *component_with(const std::string &name)
{
    ucs_list_link_t *head = ucx::uct_components_list_p;
    for (ucs_list_link_t *link = head->next; link != head; link = link->next) {
        auto *other = ucs_container_of(link, ucx::Component, list);
        if (other == &component) {
            continue;
        }
        for (ucs_list_link_t *tl = other->tl_list.next; tl != &other->tl_list; tl = tl->next) {
            if (name == ucs_container_of(tl, ucx::Tl, list)->name) {
                return other;
            }
        }
    }
    return nullptr;
}

uct_component_h handle(ucx::Component *of)
{
    return reinterpret_cast<uct_component_h>(of);
}

std::vector<uct_md_resource_desc_t> md_resources(uct_component_h of)
{
    uct_component_attr_t attr = {};
    attr.field_mask = UCT_COMPONENT_ATTR_FIELD_MD_RESOURCE_COUNT;
    if (uct_component_query(of, &attr) != UCS_OK || attr.md_resource_count == 0) {
        return {};
    }
    std::vector<uct_md_resource_desc_t> resources(attr.md_resource_count);
    attr.field_mask = UCT_COMPONENT_ATTR_FIELD_MD_RESOURCES;
    attr.md_resources = resources.data();
    if (uct_component_query(of, &attr) != UCS_OK) {
        return {};
    }
    return resources;
}

MdPtr open_lower(uct_component_h of, const char *name)
{
    uct_md_config_t *config;
    if (uct_md_config_read(of, nullptr, nullptr, &config) != UCS_OK) {
        return nullptr;
    }
    ConfigPtr guard(config);
    uct_md_h md;
    return MdPtr(uct_md_open(of, name, config, &md) == UCS_OK ? md : nullptr);
}

bool has_devices(uct_md_h md, const std::string &transport)
{
    uct_tl_resource_desc_t *resources;
    unsigned count;
    if (uct_md_query_tl_resources(md, &resources, &count) != UCS_OK) {
        return false;
    }
    bool found = false;
    for (unsigned i = 0; i < count; ++i) {
        found |= transport == resources[i].tl_name;
    }
    uct_release_tl_resource_list(resources);
    return found;
}

// The transport that carries compressed data on this machine, and the memory domains that have it.
struct Below {
    std::string transport;
    uct_component_h component = nullptr;
    std::vector<std::string> mds;
};

Below choose_below(const char *option)
{
    for (const std::string &name : candidates(option)) {
        ucx::Component *owner = component_with(name);
        if (owner == nullptr) {
            zip_debug("zip: this UCX has no transport %s", name.c_str());
            continue;
        }
        Below below{name, handle(owner), {}};
        for (const uct_md_resource_desc_t &resource : md_resources(below.component)) {
            MdPtr md = open_lower(below.component, resource.md_name);
            if (md && has_devices(md.get(), name)) {
                below.mds.push_back(resource.md_name);
            }
        }
        if (!below.mds.empty()) {
            return below;
        }
        zip_debug("zip: transport %s has no device here", name.c_str());
    }
    return {};
}

// Whether the user asked for zip by name and has not been told yet why there is none. UCX asks for
// resources several times.
bool must_explain()
{
    static std::atomic<bool> explained = false;
    const char *tls = getenv("UCX_TLS");
    if (tls == nullptr || tls[0] == '^') {
        return false;
    }
    for (const std::string &name : split(tls)) {
        if (name == "zip" || name == "\\zip") {
            return !explained.exchange(true);
        }
    }
    return false;
}

ucs_status_t query_md_resources(uct_component_h self, uct_md_resource_desc_t **resources_p,
                                unsigned *count_p)
{
    *resources_p = nullptr;
    *count_p = 0;

    uct_md_config_t *config;
    ucs_status_t status = uct_md_config_read(self, nullptr, nullptr, &config);
    if (status != UCS_OK) {
        return status;
    }
    ConfigPtr guard(config);
    const auto *options = reinterpret_cast<const MdOptions *>(config);

    if ((options->mem_types & SERVED_MEM_TYPES) == 0) {
        if (must_explain()) {
            zip_warn("zip: not used: this build compresses host memory only, and UCX_ZIP_MEM_TYPES "
                     "does not name "
                     "it; set UCX_ZIP_MEM_TYPES=host");
        }
        return UCS_OK;
    }
    const Below below = choose_below(options->transports);
    if (below.mds.empty()) {
        if (must_explain()) {
            zip_warn("zip: not used: none of the transports that it can put data on has a device "
                     "here "
                     "(UCX_ZIP_TLS=%s, UCX_TLS=%s); add one, for example tcp, to UCX_TLS",
                     options->transports, getenv("UCX_TLS"));
        }
        return UCS_OK;
    }
    auto *resources = static_cast<uct_md_resource_desc_t *>(
            calloc(below.mds.size(), sizeof(uct_md_resource_desc_t))); // UCX frees it
    if (resources == nullptr) {
        return UCS_ERR_NO_MEMORY;
    }
    for (size_t i = 0; i < below.mds.size(); ++i) {
        snprintf(resources[i].md_name, sizeof(resources[i].md_name), "%s%s", MD_PREFIX,
                 below.mds[i].c_str());
    }
    *resources_p = resources;
    *count_p = below.mds.size();
    return UCS_OK;
}

ucs_status_t md_open(uct_component_h, const char *name, const uct_md_config_t *config,
                     uct_md_h *md_p)
{
    const auto *options = reinterpret_cast<const MdOptions *>(config);
    const Below below = choose_below(options->transports);
    for (const std::string &lower_name : below.mds) {
        // as long as query_md_resources could say it
        char full[UCT_MD_NAME_MAX];
        snprintf(full, sizeof(full), "%s%s", MD_PREFIX, lower_name.c_str());
        if (strcmp(full, name) != 0) {
            continue;
        }
        MdPtr lower = open_lower(below.component, lower_name.c_str());
        std::unique_ptr<Md> md(new (std::nothrow) Md{});
        if (!lower || !md) {
            return !md ? UCS_ERR_NO_MEMORY : UCS_ERR_NO_DEVICE;
        }
        md->lower_attr.field_mask = UINT64_MAX;
        ucs_status_t status = uct_md_query_v2(lower.get(), &md->lower_attr);
        uct_component_attr_t attr = {};
        attr.field_mask = UCT_COMPONENT_ATTR_FIELD_FLAGS;
        if (status != UCS_OK || (status = uct_component_query(below.component, &attr)) != UCS_OK) {
            return status;
        }
        md->super.ops = &md_ops;
        md->super.component = &component;
        md->lower_component = below.component;
        md->transport = below.transport;
        md->lower_rkey_ptr = (attr.flags & UCT_COMPONENT_FLAG_RKEY_PTR) != 0;
        md->mem_types = options->mem_types & SERVED_MEM_TYPES;
        md->lower = lower.release();
        *md_p = reinterpret_cast<uct_md_h>(md.release());
        return UCS_OK;
    }
    return UCS_ERR_NO_DEVICE;
}

void md_close(uct_md_h md)
{
    delete md_of(md);
}

ucs_status_t md_query(uct_md_h md, ucx::MdAttr *attr)
{
    uct_md_base_md_query(attr);
    attr->flags = UCT_MD_FLAG_REG | UCT_MD_FLAG_NEED_MEMH | UCT_MD_FLAG_NEED_RKEY;
    attr->reg_mem_types = md_of(md)->mem_types;
    attr->access_mem_types = UCS_BIT(UCS_MEMORY_TYPE_HOST);
    attr->rkey_packed_size = sizeof(wire::Rkey);
    return UCS_OK;
}

// Registration is only bookkeeping: data passes through staging, so nothing is pinned.
ucs_status_t mem_reg(uct_md_h md_handle, void *address, size_t length, const ucx::MemRegParams *,
                     uct_mem_h *memh_p)
{
    Md *md = md_of(md_handle);
    auto *region = new (std::nothrow)
            Region{random_id(), reinterpret_cast<uintptr_t>(address), length, false, 0};
    if (region == nullptr) {
        return UCS_ERR_NO_MEMORY;
    }
    std::lock_guard lock(md->mutex);
    md->regions.emplace(region->id, region);
    *memh_p = region;
    return UCS_OK;
}

ucs_status_t mem_dereg(uct_md_h md_handle, const ucx::MemDeregParams *params)
{
    if ((params->field_mask & ucx::MemDeregParams::MEMH) == 0) {
        return UCS_ERR_INVALID_PARAM;
    }
    Md *md = md_of(md_handle);
    auto *region = static_cast<Region *>(params->memh);
    {
        std::unique_lock lock(md->mutex);
        md->regions.erase(region->id);
        md->unpinned.wait(lock, [region] { return region->pins == 0; });
    }
    delete region;
    return UCS_OK;
}

ucs_status_t mkey_pack(uct_md_h md_handle, uct_mem_h memh, void *, size_t, const void *,
                       void *buffer)
{
    Md *md = md_of(md_handle);
    auto *region = static_cast<Region *>(memh);
    wire::Rkey rkey{{}, 0, region->id};
    {
        std::lock_guard lock(md->mutex);
        region->exported = true;
    }
    memcpy(buffer, &rkey, sizeof(rkey));
    return UCS_OK;
}

ucs_status_t rkey_unpack(uct_component_h, const void *buffer, const void *, uct_rkey_t *rkey_p,
                         void **handle_p)
{
    wire::Rkey packed;
    memcpy(&packed, buffer,
           sizeof(packed)); // UCP has checked the length against the peer's packed size
    if (!packed.version.matches()) {
        return UCS_ERR_UNREACHABLE;
    }
    auto *rkey = new (std::nothrow) Rkey{packed.region};
    if (rkey == nullptr) {
        return UCS_ERR_NO_MEMORY;
    }
    *rkey_p = reinterpret_cast<uct_rkey_t>(rkey);
    *handle_p = rkey;
    return UCS_OK;
}

ucs_status_t rkey_release(uct_component_h, uct_rkey_t, void *rkey)
{
    delete static_cast<Rkey *>(rkey);
    return UCS_OK;
}

ucs_status_t rkey_compare(uct_component_h, uct_rkey_t a, uct_rkey_t b, const void *, int *result)
{
    const uint64_t x = reinterpret_cast<Rkey *>(a)->region, y = reinterpret_cast<Rkey *>(b)->region;
    *result = (x > y) - (x < y);
    return UCS_OK;
}

} // namespace

Md::~Md()
{
    for (auto &[id, region] : regions) {
        delete region;
    }
    if (lower != nullptr) {
        uct_md_close(lower);
    }
}

Region *Md::pin(uint64_t id, uint64_t address, uint64_t length)
{
    std::lock_guard lock(mutex);
    auto found = regions.find(id);
    if (found == regions.end()) {
        return nullptr;
    }
    Region *region = found->second;
    if (!region->exported || address < region->address || length > region->length ||
        address - region->address > region->length - length) {
        return nullptr;
    }
    ++region->pins;
    return region;
}

void Md::unpin(Region *region)
{
    std::lock_guard lock(mutex);
    if (--region->pins == 0) {
        unpinned.notify_all();
    }
}

void init_component()
{
    ucx::use_own_parsers(md_options_table);
    md_options_table[1].parser.arg = ucx::ucs_memory_type_names_p;

    fill_unsupported(md_ops);
    md_ops.close = md_close;
    md_ops.query = md_query;
    md_ops.mem_reg = mem_reg;
    md_ops.mem_dereg = mem_dereg;
    md_ops.mkey_pack = mkey_pack;

    strcpy(component.name, "zip");
    component.query_md_resources = query_md_resources;
    component.md_open = md_open;
    component.cm_open = [] { return UCS_ERR_UNSUPPORTED; };
    component.rkey_unpack = rkey_unpack;
    component.rkey_ptr = [] { return UCS_ERR_UNSUPPORTED; };
    component.rkey_release = rkey_release;
    component.rkey_compare = rkey_compare;
    component.md_config.name = "zip memory domain";
    component.md_config.prefix = "ZIP_";
    component.md_config.table = md_options_table;
    component.md_config.size = sizeof(MdOptions);
    component.cm_config.name = "";
    component.cm_config.prefix = "";
    component.tl_list.next = component.tl_list.prev = &component.tl_list;
    component.md_vfs_init = [](uct_md_h) {};
}

} // namespace zip
