// SPDX-License-Identifier: BSD-3-Clause
// Memory domain: choice of the transport below, registration, remote keys.
#include "uct/zip/zip_md.h"

#include <sys/random.h>

#include <algorithm>
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
// Of keys of the domains below, which are all of one component: UCX unpacks keys without a domain.
static std::atomic<size_t> lower_rkey_length;

static const char *bypass_option_names[] = {"auto", "never", "always", nullptr};

ucs_config_field_t md_options_table[] = {
        {"TLS", "auto",
         "Transports to put compressed data on, best first; the first one that has a device here "
         "is used.\n"
         "\"auto\" takes rc_mlx5, rc_verbs, dc_mlx5, srd, tcp, posix and sysv in this order, and "
         "if "
         "UCX_TLS lists\n"
         "transports, only those listed there.",
         offsetof(MdOptions, transports), UCS_CONFIG_TYPE_STRING},

        {"MEM_TYPES", "cuda,cuda-managed,rocm",
         "Memory types to serve. GPU memory is served where the GPU's driver is found and UCX_TLS "
         "names zip. Host\n"
         "memory has to be named, because the transport then takes part in all large transfers of "
         "host memory.",
         offsetof(MdOptions, mem_types),
         UCS_CONFIG_TYPE_BITMAP(nullptr)}, // names: init_component()

        {"GPU_CODEC", "auto",
         "The library that encodes and decodes on GPUs: auto (libzip_cuda.so for CUDA memory, "
         "libzip_hip.so for ROCm\n"
         "memory), or the path of another one.",
         offsetof(MdOptions, gpu_codec), UCS_CONFIG_TYPE_STRING},

        {"BYPASS", "auto",
         "Whether an operation goes uncompressed, straight between the application's buffers, "
         "where "
         "the transport below\n"
         "can do that: auto (where compressing does not pay, by what was measured), never, always.",
         offsetof(MdOptions, bypass), UCS_CONFIG_TYPE_ENUM(bypass_option_names)},

        {nullptr, nullptr, nullptr, 0, {}}};

constexpr uint64_t HOST = UCS_BIT(UCS_MEMORY_TYPE_HOST);
// What a back end of the codec is for.
constexpr struct {
    const char *name;
    uint64_t mem_types;
} BACK_ENDS[] = {
        {"cuda", UCS_BIT(UCS_MEMORY_TYPE_CUDA) | UCS_BIT(UCS_MEMORY_TYPE_CUDA_MANAGED)},
        {"hip", UCS_BIT(UCS_MEMORY_TYPE_ROCM)},
};
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
            {"rc", ",rc_mlx5,rc_verbs,"},
            {"rc_x", ",rc_mlx5,"},
            {"rc_v", ",rc_verbs,"},
            {"dc", ",dc_mlx5,"},
            {"dc_x", ",dc_mlx5,"},
            {"shm", ",posix,sysv,"},
            {"sm", ",posix,sysv,"},
            {"mm", ",posix,sysv,"},
            {"ib", ",rc_mlx5,rc_verbs,dc_mlx5,srd,"},
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
    std::vector<std::string> names{"rc_mlx5", "rc_verbs", "dc_mlx5", "srd", "tcp", "posix", "sysv"};
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
        auto *other = ZIP_CONTAINER_OF(link, ucx::Component, list);
        if (other == &component) {
            continue;
        }
        for (ucs_list_link_t *tl = other->tl_list.next; tl != &other->tl_list; tl = tl->next) {
            if (name == ZIP_CONTAINER_OF(tl, ucx::Tl, list)->name) {
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

// Whether UCX_TLS names zip, rather than lists nothing or what not to use.
bool is_named()
{
    const char *tls = getenv("UCX_TLS");
    if (tls == nullptr || tls[0] == '^') {
        return false;
    }
    for (const std::string &name : split(tls)) {
        if (name == "zip" || name == "\\zip") {
            return true;
        }
    }
    return false;
}

// The back end of the codec for GPU memory, if its driver is there.
const zip_gpu_api_t *back_end(const MdOptions *options, const char *name)
{
    const bool is_auto = strcmp(options->gpu_codec, "auto") == 0;
    const char *why = nullptr;
    const zip_gpu_api_t *api = zip_gpu_load(is_auto ? name : options->gpu_codec, &why);
    zip_gpu_memory_t memory;
    if (api != nullptr && api->memory_query(nullptr, &memory) != ZIP_OK) {
        why = api->error_text();
        api = nullptr;
    }
    if (api == nullptr && is_auto) {
        zip_debug("zip: no GPU memory by %s: %s", name, why);
    } else if (api == nullptr) {
        zip_error("zip: UCX_ZIP_GPU_CODEC: %s", why);
    }
    return api;
}

// Which of the types that `options` names are served, and by what.
uint64_t served_types(const MdOptions *options, std::vector<const zip_gpu_api_t *> *back_ends)
{
    uint64_t served = options->mem_types & HOST;
    for (const auto &[name, mem_types] : BACK_ENDS) {
        const zip_gpu_api_t *api = nullptr;
        if ((options->mem_types & mem_types) != 0 && is_named()) {
            api = back_end(options, name);
        }
        if (api == nullptr) {
            continue;
        }
        served |= options->mem_types & mem_types;
        if (back_ends != nullptr &&
            std::find(back_ends->begin(), back_ends->end(), api) == back_ends->end()) {
            back_ends->push_back(api);
        }
    }
    return served;
}

ucs_status_t query_lower(uct_md_h md, ucx::MdAttr &attr)
{
    attr.field_mask = UINT64_MAX;
    return uct_md_query_v2(md, &attr);
}

Below choose_below(const MdOptions *options)
{
    if (served_types(options, nullptr) == 0) {
        return {};
    }
    for (const std::string &name : candidates(options->transports)) {
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
    return is_named() && !explained.exchange(true);
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

    const Below below = choose_below(options);
    if (below.mds.empty()) {
        if (must_explain()) {
            const char *tls = getenv("UCX_TLS");
            zip_warn("zip: not used: %s (UCX_ZIP_TLS=%s, UCX_TLS=%s)",
                     served_types(options, nullptr) != 0
                             ? "none of the transports that it can put data on has a device here; "
                               "add one, for example tcp, to UCX_TLS"
                             : "there is no GPU here whose memory UCX_ZIP_MEM_TYPES names; to "
                               "compress host memory set UCX_ZIP_MEM_TYPES=host",
                     options->transports, tls);
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
    const Below below = choose_below(options);
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
        ucs_status_t status = query_lower(lower.get(), md->lower_attr);
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
        md->lower_registers =
                (md->lower_attr.flags & UCT_MD_FLAG_REG) != 0 &&
                (md->lower_attr.flags & (UCT_MD_FLAG_NEED_MEMH | UCT_MD_FLAG_NEED_RKEY)) != 0;
        md->mem_types = served_types(options, &md->back_ends);
        md->bypass = static_cast<BypassOption>(options->bypass);
        lower_rkey_length = md->lower_key_size();
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

ucs_status_t md_query(uct_md_h md_handle, ucx::MdAttr *attr)
{
    uct_md_base_md_query(attr);
    const Md *md = md_of(md_handle);
    attr->flags = UCT_MD_FLAG_REG | UCT_MD_FLAG_NEED_MEMH | UCT_MD_FLAG_NEED_RKEY;
    attr->reg_mem_types = md->mem_types;
    if (!md->back_ends.empty()) {
        attr->flags |= md->lower_attr.flags & UCT_MD_FLAG_REG_DMABUF;
    }
    attr->access_mem_types = HOST;
    attr->rkey_packed_size = sizeof(wire::Rkey) + md->lower_key_size();
    return UCS_OK;
}

// Host memory is registered below only when something goes straight from it or into it. For a GPU's
// memory what registering it takes is at hand only now.
ucs_status_t mem_reg(uct_md_h md_handle, void *address, size_t length,
                     const ucx::MemRegParams *params, uct_mem_h *memh_p)
{
    Md *md = md_of(md_handle);
    const int ring = md->ring_for(address);
    uct_mem_h lower_memh = nullptr;
    if (ring != 0 && md->lower_takes_gpu()) {
        ucx::MemRegParams lower = *params;
        // what UCX only gets into peers may put into, too
        lower.flags |= ring > 0 ? UCT_MD_MEM_FLAG_HIDE_ERRORS | UCT_MD_MEM_ACCESS_RMA : 0;
        const ucs_status_t status =
                uct_md_mem_reg_v2(md->lower, address, length, &lower, &lower_memh);
        if (status == UCS_OK) {
            md->count_registration(static_cast<ssize_t>(length));
        } else if (ring > 0) {
            lower_memh = nullptr; // all of it goes through staging
        } else {
            return status;
        }
    } else if (ring == Region::NO_RING) {
        return UCS_ERR_UNSUPPORTED;
    }
    auto *region = new (std::nothrow) Region{
            random_id(), reinterpret_cast<uintptr_t>(address), length, ring, false, 0, lower_memh,
            ring != 0};
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
    md_of(md_handle)->remove_region(static_cast<Region *>(params->memh));
    return UCS_OK;
}

// A rendezvous packs a key for each of its messages; other keys are for all of a region.
ucs_status_t mkey_pack(uct_md_h md_handle, uct_mem_h memh, void *address, size_t length,
                       const void *, void *buffer)
{
    Md *md = md_of(md_handle);
    auto *region = static_cast<Region *>(memh);
    const bool is_short =
            region->on_gpu() && region->lower_memh != nullptr && length < md->least_gpu;
    const uint16_t mark = wire::range_mark(reinterpret_cast<uintptr_t>(address), length);
    wire::Rkey rkey{{},
                    0,
                    static_cast<uint8_t>(region->ring + 1),
                    is_short ? wire::Rkey::SHORT : mark,
                    region->id};
    auto *lower = static_cast<char *>(buffer) + sizeof(rkey);
    memset(lower, 0, md->lower_key_size());
    if (is_short) {
        memcpy(buffer, &rkey, sizeof(rkey));
        return UCS_OK;
    }
    if (md->lower_key_size() > 0 && (region->ring != 0 || md->bypass != BypassOption::NEVER) &&
        md->pack_lower(region, lower)) {
        rkey.lower_length = static_cast<uint8_t>(md->lower_key_size());
    }
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
    wire::RkeyView packed;
    const size_t lower_length = lower_rkey_length;
    // UCP has checked the length against the peer's packed size. Where zip cannot be reached it
    // chooses among its other lanes, as it does without zip.
    if (!wire::parse(buffer, sizeof(packed.head) + lower_length, lower_length, packed) ||
        (packed.head.flags & wire::Rkey::SHORT) != 0) {
        return UCS_ERR_UNREACHABLE;
    }
    auto *rkey = new (std::nothrow)
            Rkey{packed.head.region, int{packed.head.rings} - 1, packed.head.flags};
    if (rkey == nullptr) {
        return UCS_ERR_NO_MEMORY;
    }
    if (packed.lower != nullptr) {
        rkey->lower.assign(packed.lower, packed.lower + packed.head.lower_length);
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

void RegistrationCounters::add(size_t length)
{
    ++count;
    bytes += length;
    peak_bytes = std::max(peak_bytes, bytes);
}

Md::~Md()
{
    for (auto &[id, region] : regions) {
        if (region->lower_memh != nullptr) {
            uct_md_mem_dereg(lower, region->lower_memh);
        }
        delete region;
    }
    if (lower != nullptr) {
        uct_md_close(lower);
    }
}

uct_mem_h Md::lower_memh(Region *region)
{
    std::lock_guard lock(registration_mutex);
    if (!region->lower_tried && lower_registers) {
        region->lower_tried = true;
        const ucx::MemRegParams params{ucx::MemRegParams::FLAGS,
                                       UCT_MD_MEM_ACCESS_LOCAL_READ |
                                               UCT_MD_MEM_ACCESS_LOCAL_WRITE |
                                               UCT_MD_MEM_ACCESS_RMA | UCT_MD_MEM_FLAG_HIDE_ERRORS,
                                       -1, 0};
        const ucs_status_t status =
                uct_md_mem_reg_v2(lower, reinterpret_cast<void *>(region->address), region->length,
                                  &params, &region->lower_memh);
        if (status == UCS_OK) {
            registered.add(region->length);
        } else {
            region->lower_memh = nullptr;
            zip_debug("zip: %zu bytes at 0x%lx cannot be registered below (%s) and go through "
                      "staging",
                      region->length, region->address, ucs_status_string(status));
        }
    }
    return region->lower_memh;
}

size_t Md::lower_key_size() const
{
    return lower_registers && (lower_attr.flags & UCT_MD_FLAG_NEED_RKEY) != 0 && !lower_rkey_ptr
                   ? lower_attr.rkey_packed_size
                   : 0;
}

bool Md::pack_lower(Region *region, char *key)
{
    uct_mem_h memh = lower_memh(region);
    return memh != nullptr && uct_md_mkey_pack(lower, memh, key) == UCS_OK;
}

Region *Md::add_region(void *address, size_t length, int ring)
{
    auto *region = new (std::nothrow) Region{
            random_id(), reinterpret_cast<uintptr_t>(address), length, ring, true, 0, nullptr,
            true};
    if (region != nullptr) {
        std::lock_guard lock(mutex);
        regions.emplace(region->id, region);
    }
    return region;
}

void Md::remove_region(Region *region)
{
    {
        std::unique_lock lock(mutex);
        regions.erase(region->id);
        unpinned.wait(lock, [region] { return region->pins == 0; });
        // A GPU's work may be waited for by nobody else: this may be the thread that would notice.
        // Under the mutex, because a ticket's queue lives until its pin is gone.
        for (const GpuQueue::Ticket &ticket : region->device_pins) {
            GpuQueue::await(ticket);
        }
    }
    if (region->lower_memh != nullptr) {
        uct_md_mem_dereg(lower, region->lower_memh);
        count_registration(-static_cast<ssize_t>(region->length));
    }
    std::lock_guard lock(mutex);
    region->removed = true;
    if (region->device_pins.empty()) {
        delete region;
    }
}

int Md::ring_for(const void *address)
{
    for (const zip_gpu_api_t *api : back_ends) {
        bool is_gpu;
        Gpu *found = Gpu::of(*api, address, is_gpu);
        if (!is_gpu) {
            continue;
        }
        std::lock_guard lock(mutex);
        auto known = std::find(gpus.begin(), gpus.end(), found);
        if (found == nullptr || (known == gpus.end() && gpus.size() + 1 >= wire::MAX_RINGS)) {
            return Region::NO_RING;
        }
        if (known == gpus.end()) {
            known = gpus.insert(gpus.end(), found);
        }
        return static_cast<int>(known - gpus.begin()) + 1;
    }
    return 0;
}

Gpu *Md::gpu(unsigned ring)
{
    std::lock_guard lock(mutex);
    return ring > 0 && ring <= gpus.size() ? gpus[ring - 1] : nullptr;
}

bool Md::stages_gpu_on_host() const
{
    return lower_rkey_ptr || !lower_takes_gpu();
}

bool Md::lower_takes_gpu() const
{
    return (lower_attr.reg_mem_types & mem_types & ~HOST) != 0 ||
           (lower_attr.flags & UCT_MD_FLAG_REG_DMABUF) != 0;
}

RegistrationCounters Md::registrations()
{
    std::lock_guard lock(registration_mutex);
    return registered;
}

void Md::count_registration(ssize_t length)
{
    std::lock_guard lock(registration_mutex);
    if (length > 0) {
        registered.add(static_cast<size_t>(length));
    } else {
        registered.remove(static_cast<size_t>(-length));
    }
}

Rkey::~Rkey()
{
    if (component != nullptr) {
        uct_rkey_release(component, &bundle);
    }
}

bool Rkey::unpack_lower(uct_component_h lower_component)
{
    if (component == nullptr && !lower.empty()) {
        if (uct_rkey_unpack(lower_component, lower.data(), &bundle) == UCS_OK) {
            component = lower_component;
        } else {
            lower.clear(); // not tried again
        }
    }
    return component != nullptr;
}

Region *Md::pin(uint64_t id, uint64_t address, uint64_t length)
{
    std::lock_guard lock(mutex);
    auto found = regions.find(id);
    if (found == regions.end()) {
        return nullptr;
    }
    Region *region = found->second;
    if (!region->exported || !wire::inside(address, length, region->address, region->length)) {
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

void Md::pin_device(Region *region, const GpuQueue::Ticket &ticket)
{
    std::lock_guard lock(mutex);
    region->device_pins.push_back(ticket);
}

void Md::unpin_device(Region *region, const GpuQueue::Ticket &ticket)
{
    std::lock_guard lock(mutex);
    const auto held = std::find(region->device_pins.begin(), region->device_pins.end(), ticket);
    region->device_pins.erase(held);
    if (region->removed && region->device_pins.empty()) {
        delete region;
    }
}

void Md::repin_device(Region *region, const GpuQueue::Ticket &from, const GpuQueue::Ticket &to)
{
    std::lock_guard lock(mutex);
    *std::find(region->device_pins.begin(), region->device_pins.end(), from) = to;
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
