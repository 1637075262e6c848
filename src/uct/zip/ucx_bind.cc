// SPDX-License-Identifier: BSD-3-Clause
// The table of UCX functions behind ucx_bind.h, the stubs that jump through it, and how it is
// filled.
#include "uct/zip/ucx_bind.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/stat.h>

#include <cstring>
#include <type_traits>
#include <vector>

// One slot a function, and a stub of the function's own name that jumps to what the slot holds. The
// stubs are hidden, so calls in this object bind to them at link time and nothing of UCX stays
// undefined.
#if defined(__x86_64__)
#define ZIP_STUB(name)                                                                             \
    asm(".pushsection .text\n.balign 16\n.globl " #name "\n.hidden " #name "\n.type " #name        \
        ",@function\n" #name ":\n  jmp *zip_ucx_slot_" #name "(%rip)\n.size " #name ", .-" #name   \
        "\n.popsection\n");
#elif defined(__aarch64__)
#define ZIP_STUB(name)                                                                             \
    asm(".pushsection .text\n.balign 16\n.globl " #name "\n.hidden " #name "\n.type " #name        \
        ",%function\n" #name ":\n  adrp x16, zip_ucx_slot_" #name                                  \
        "\n  ldr x16, [x16, :lo12:zip_ucx_slot_" #name "]\n"                                       \
        "  br x16\n.size " #name ", .-" #name "\n.popsection\n");
#else
#error "no call stub for this processor: add one here"
#endif

extern "C" {
#define ZIP_UCX_FUNCTION(library, name)                                                            \
    __attribute__((visibility("hidden"), used)) void *zip_ucx_slot_##name;                         \
    ZIP_STUB(name)
#include "uct/zip/ucx_symbols.h"
}

namespace zip::ucx {

#define ZIP_UCX_DATA(library, type, name) type *name##_p;
#include "uct/zip/ucx_symbols.h"

namespace {

enum Library { UCS, UCT };

#define ZIP_UCX_OPTIONAL(library, name) void *name##_slot;
#include "uct/zip/ucx_symbols.h"

enum Kind { FUNCTION, DATA, OPTIONAL };

struct Entry {
    Library library;
    const char *name;
    void **slot;
    Kind kind;
    void *stub; // of a function
};

const Entry entries[] = {
#define ZIP_UCX_FUNCTION(library, name)                                                            \
    {library, #name, &zip_ucx_slot_##name, FUNCTION, reinterpret_cast<void *>(name)},
#define ZIP_UCX_DATA(library, type, name) {library, #name, (void **)&name##_p, DATA, nullptr},
#define ZIP_UCX_OPTIONAL(library, name) {library, #name, &name##_slot, OPTIONAL, nullptr},
#include "uct/zip/ucx_symbols.h"
};

const void *ucs_base; // where the chosen libucs is mapped
std::string uct_path;

// An object that is loaded already, held open so that it stays.
class LoadedObject {
public:
    explicit LoadedObject(const char *path)
        : handle_(dlopen(path, RTLD_NOLOAD | RTLD_LAZY | RTLD_LOCAL))
    {
    }
    ~LoadedObject()
    {
        if (handle_ != nullptr) {
            dlclose(handle_);
        }
    }
    LoadedObject(const LoadedObject &) = delete;
    LoadedObject &operator=(const LoadedObject &) = delete;

    // The symbol if this very object defines it; one found in a dependency may belong to another
    // copy of UCX.
    void *symbol(const char *name, const void *base) const
    {
        void *address = (handle_ != nullptr) ? dlsym(handle_, name) : nullptr;
        Dl_info info;
        return (address != nullptr && dladdr(address, &info) != 0 && info.dli_fbase == base)
                       ? address
                       : nullptr;
    }

    // The address at which this object itself uses a data symbol of its own. That is not always
    // where it defines it: an executable linked against the library may hold a copy of the object
    // that replaces the library's (a copy relocation), as ucx_info does with ucs_global_opts. The
    // truth is what the dynamic linker wrote into the object's own relocations.
    void *data(const char *name, const void *base) const
    {
        void *defined = symbol(name, base);
        link_map *map = nullptr;
        if (defined == nullptr || dlinfo(handle_, RTLD_DI_LINKMAP, &map) != 0) {
            return defined;
        }
        const ElfW(Sym) *symbols = nullptr;
        const char *strings = nullptr;
        const ElfW(Rela) *relocations = nullptr;
        size_t size = 0;
        for (const ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; ++entry) {
            switch (entry->d_tag) {
            case DT_SYMTAB:
                symbols = reinterpret_cast<const ElfW(Sym) *>(entry->d_un.d_ptr);
                break;
            case DT_STRTAB:
                strings = reinterpret_cast<const char *>(entry->d_un.d_ptr);
                break;
            case DT_RELA:
                relocations = reinterpret_cast<const ElfW(Rela) *>(entry->d_un.d_ptr);
                break;
            case DT_RELASZ:
                size = entry->d_un.d_val;
                break;
            default:
                break;
            }
        }
        if (symbols == nullptr || strings == nullptr || relocations == nullptr) {
            return defined;
        }
        for (size_t i = 0; i < size / sizeof(*relocations); ++i) {
            const ElfW(Rela) &relocation = relocations[i];
            if (ELF64_R_TYPE(relocation.r_info) == GLOB_DAT &&
                strcmp(strings + symbols[ELF64_R_SYM(relocation.r_info)].st_name, name) == 0) {
                return *reinterpret_cast<void **>(map->l_addr + relocation.r_offset);
            }
        }
        return defined;
    }

private:
#if defined(__x86_64__)
    static constexpr unsigned GLOB_DAT = R_X86_64_GLOB_DAT;
#else
    static constexpr unsigned GLOB_DAT = R_AARCH64_GLOB_DAT;
#endif
    void *handle_;
};

std::string folder(const std::string &path)
{
    const size_t slash = path.rfind('/');
    return slash == std::string::npos ? "." : path.substr(0, slash);
}

// By what the file system says: one folder may go by several paths, such as /lib and /usr/lib.
bool same_folder(const std::string &a, const std::string &b)
{
    struct stat x, y;
    return stat(folder(a).c_str(), &x) == 0 && stat(folder(b).c_str(), &y) == 0 &&
           x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

struct Object {
    std::string path;
    const void *base; // as dladdr reports it
};

// Every loaded object with its first mapped address.
std::vector<Object> loaded_objects()
{
    std::vector<Object> objects;
    dl_iterate_phdr(
            [](dl_phdr_info *info, size_t, void *arg) {
                for (int i = 0; i < info->dlpi_phnum; ++i) {
                    if (info->dlpi_phdr[i].p_type == PT_LOAD) {
                        const void *address =
                                (const void *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
                        Dl_info found;
                        if (info->dlpi_name[0] != 0 && dladdr(address, &found) != 0) {
                            static_cast<std::vector<Object> *>(arg)->push_back(
                                    {info->dlpi_name, found.dli_fbase});
                        }
                        break;
                    }
                }
                return 0;
            },
            &objects);
    return objects;
}

} // namespace

#define ZIP_UCX_OPTIONAL(library, name)                                                            \
    void *name##_address()                                                                         \
    {                                                                                              \
        return name##_slot;                                                                        \
    }
#include "uct/zip/ucx_symbols.h"

void use_own_parsers(ucs_config_field_t *table)
{
    const auto own = [](auto *&function) {
        for (const Entry &entry : entries) {
            if (entry.stub != nullptr && entry.stub == reinterpret_cast<void *>(function)) {
                function =
                        reinterpret_cast<std::remove_reference_t<decltype(function)>>(*entry.slot);
            }
        }
    };
    for (ucs_config_field_t *field = table; field->name != nullptr; ++field) {
        own(field->parser.read);
        own(field->parser.write);
        own(field->parser.clone);
        own(field->parser.release);
        own(field->parser.help);
        own(field->parser.doc);
    }
}

bool bound_to(const void *caller)
{
    Dl_info info;
    return ucs_base != nullptr && dladdr(caller, &info) != 0 && info.dli_fbase == ucs_base;
}

const char *library_path()
{
    return uct_path.c_str();
}

bool bind(const void *caller, std::string &why)
{
    Dl_info ucs_info;
    if (dladdr(caller, &ucs_info) == 0) {
        why = "cannot tell which library is loading the plugin";
        return false;
    }
    LoadedObject ucs(ucs_info.dli_fname);
    if (ucs.symbol("ucs_config_parser_fill_opts", ucs_info.dli_fbase) == nullptr) {
        why = std::string(ucs_info.dli_fname) + " is loading the plugin, and is no libucs";
        return false;
    }

    // libuct is the one that lies beside libucs; with several there, the one whose parser symbols
    // resolve to this libucs.
    Object uct_object{"", nullptr};
    for (const Object &object : loaded_objects()) {
        if (same_folder(object.path, ucs_info.dli_fname) && object.base != ucs_info.dli_fbase &&
            LoadedObject(object.path.c_str()).symbol("uct_component_register", object.base) !=
                    nullptr) {
            uct_object = object;
            break;
        }
    }
    if (uct_object.base == nullptr) {
        why = "no libuct is loaded from " + folder(ucs_info.dli_fname);
        return false;
    }
    LoadedObject uct(uct_object.path.c_str());

    std::vector<void *> found;
    for (const Entry &entry : entries) {
        const LoadedObject &object = entry.library == UCS ? ucs : uct;
        const void *base = entry.library == UCS ? ucs_info.dli_fbase : uct_object.base;
        void *address = entry.kind == DATA ? object.data(entry.name, base)
                                           : object.symbol(entry.name, base);
        if (address == nullptr && entry.kind != OPTIONAL) {
            why = (entry.library == UCS ? std::string(ucs_info.dli_fname) : uct_object.path) +
                  " has no " + entry.name + ": is it older than UCX 1.22?";
            return false;
        }
        found.push_back(address);
    }
    for (size_t i = 0; i < found.size(); ++i) {
        *entries[i].slot = found[i];
    }
    ucs_base = ucs_info.dli_fbase;
    uct_path = uct_object.path;
    return true;
}

} // namespace zip::ucx
