// SPDX-License-Identifier: BSD-3-Clause
// The load-time test of ucx_abi.h: three ways of asking the loaded libuct where it keeps things.
//
// 1. Its own objects (components, transports, classes, names) are read through a pipe, where a bad
//    address is an error and not a signal.
// 2. Structures of traps are handed to its entry points: every word is a function that does nothing
//    but note its own position and arguments, so whatever word the library takes is safe to call.
// 3. Structures with known contents are handed over, or filled by the library inside a larger
//    block. These go last: they are safe only once the layouts of 1 and 2 agree.
//
// Nothing is registered, and nothing outlives the test.
#include "uct/zip/ucx_guard.h"

#include "uct/zip/ucx_abi.h"
#include "uct/zip/ucx_bind.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#include <utility>
#include <vector>

namespace zip::ucx {
namespace {

// ---- What is declared

struct Member {
    const char *name;
    size_t offset;
    size_t size;

    size_t word() const { return offset / sizeof(void *); }
};

#define MEMBER(type, field) (Member{#type "::" #field, offsetof(type, field), sizeof(type::field)})

// ---- Traps

constexpr size_t TRAPS = 128; // words in a structure of traps: more than any tested this way
constexpr size_t DECOY = TRAPS - 1;
constexpr size_t NOT_CALLED = SIZE_MAX;
constexpr size_t TRAP_ARGS = 6; // as many as travel in registers on every processor

struct Call {
    size_t word;
    std::array<uintptr_t, TRAP_ARGS> args;
};

// Other threads use UCX meanwhile, though never our traps.
thread_local Call last_call;

template <size_t Word>
ucs_status_t trap(uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t e, uintptr_t f)
{
    last_call = {Word, {a, b, c, d, e, f}};
    return UCS_ERR_UNSUPPORTED;
}

using Trap = ucs_status_t (*)(uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t);

template <size_t... Word>
constexpr std::array<Trap, sizeof...(Word)> make_traps(std::index_sequence<Word...>)
{
    return {&trap<Word>...};
}

// Filled by the loader: the guard may run before this object's constructors do.
constinit const std::array<Trap, TRAPS> trap_table = make_traps(std::make_index_sequence<TRAPS>());

// A structure of unknown layout, as the words that it may consist of.
struct Words {
    std::array<const void *, TRAPS> word;

    // Every word can be called.
    static Words traps()
    {
        Words words;
        for (size_t i = 0; i < TRAPS; ++i) {
            words.word[i] = reinterpret_cast<const void *>(trap_table[i]);
        }
        return words;
    }

    // The same, for a structure that the library should not come across.
    static Words decoys() { return all(reinterpret_cast<const void *>(trap_table[DECOY])); }

    static Words all(const void *value)
    {
        Words words;
        words.word.fill(value);
        return words;
    }

    void set(Member member, const void *value) { word[member.word()] = value; }

    void set_number(Member member, uintptr_t value)
    {
        set(member, reinterpret_cast<const void *>(value));
    }

    template <typename Function>
    void set_function(Member member, Function *function)
    {
        set(member, reinterpret_cast<const void *>(function));
    }

    void set_text(Member member, const char *text)
    {
        char *field = reinterpret_cast<char *>(word.data()) + member.offset;
        std::memset(field, 0, member.size);
        std::strncpy(field, text, member.size - 1);
    }

    // These words seen as the library sees them.
    template <typename Pointer>
    Pointer as()
    {
        return reinterpret_cast<Pointer>(this);
    }
};

static_assert(offsetof(BaseIface, tail) <= sizeof(Words), "raise TRAPS");

// What an argument of a trap has to be.
struct Arg {
    uintptr_t value;
    bool any;

    template <typename T>
    Arg(T argument) : value(0), any(sizeof(T) != sizeof(value))
    {
        if constexpr (std::is_null_pointer_v<T>) {
            value = 0;
        } else if constexpr (sizeof(T) == sizeof(value)) {
            value = (uintptr_t)argument;
        } // else the upper half of the register holds anything
    }
};

constexpr char ANY = 0; // an argument that is the library's own business

// ---- Reads that cannot fault

class SafeReader {
public:
    SafeReader()
    {
        if (pipe2(fd_, O_CLOEXEC | O_NONBLOCK) != 0) {
            fd_[0] = fd_[1] = -1;
        }
    }
    ~SafeReader()
    {
        close(fd_[0]);
        close(fd_[1]);
    }
    SafeReader(const SafeReader &) = delete;
    SafeReader &operator=(const SafeReader &) = delete;

    bool usable() const { return fd_[0] >= 0; }

    // At most PIPE_BUF bytes, which a pipe takes whole or not at all.
    bool read(const void *address, void *copy, size_t size)
    {
        ssize_t sent;
        do {
            // Not write(): sanitizers would take that for an access of ours.
            sent = syscall(SYS_write, fd_[1], address, size);
        } while (sent < 0 && errno == EINTR);
        if (sent != ssize_t(size)) {
            drain();
            return false;
        }
        ssize_t received;
        do {
            received = ::read(fd_[0], copy, size);
        } while (received < 0 && errno == EINTR);
        return received == ssize_t(size);
    }

    template <typename T>
    bool read(const void *address, T &copy)
    {
        static_assert(sizeof(T) <= PIPE_BUF);
        return read(address, &copy, sizeof(copy));
    }

    // A short printable string, or "?" if there is none.
    std::string text(const void *address)
    {
        constexpr uintptr_t PAGE = 4096; // the smallest there is
        constexpr size_t LONGEST = 128;
        std::string found;
        auto position = reinterpret_cast<uintptr_t>(address);
        while (found.size() < LONGEST) {
            char piece[32];
            const size_t size = std::min<size_t>(sizeof(piece), PAGE - position % PAGE);
            if (!read(reinterpret_cast<const void *>(position), piece, size)) {
                break;
            }
            char *end = std::find(piece, piece + size, '\0');
            if (!std::all_of(piece, end, [](char c) { return c >= ' ' && c <= '~'; })) {
                break;
            }
            found.append(piece, end);
            if (end != piece + size) {
                return found;
            }
            position += size;
        }
        return "?";
    }

private:
    void drain()
    {
        char rest[64];
        while (::read(fd_[0], rest, sizeof(rest)) > 0) {
        }
    }

    int fd_[2];
};

bool is_code(const void *address)
{
    Dl_info info;
    return address != nullptr && dladdr(address, &info) != 0;
}

// Size of an object as the symbol table states it, 0 if it does not.
size_t symbol_size(const void *address)
{
    Dl_info info;
    ElfW(Sym) *symbol = nullptr;
    const bool found =
            dladdr1(address, &info, reinterpret_cast<void **>(&symbol), RTLD_DL_SYMENT) != 0 &&
            symbol != nullptr && info.dli_saddr == address;
    return found ? symbol->st_size : 0;
}

// An optional function of ucx_symbols.h.
template <typename Signature>
Signature *function_at(void *address)
{
    return reinterpret_cast<Signature *>(address);
}

// ---- Blocks that the library writes into

struct alignas(64) Block {
    unsigned char byte[2048]; // more than the library writes, whatever the layout
};

struct Extent {
    size_t begin;
    size_t end;
};

// Where fill() writes in a block that begins with `field_mask`. It is run on two backgrounds, so
// that a value cannot hide in one.
template <typename Fill>
Extent written_by(uint64_t field_mask, Block &block, Fill fill)
{
    Block other;
    std::memset(&block, 0xa5, sizeof(block));
    std::memset(&other, 0x5a, sizeof(other));
    std::memcpy(&block, &field_mask, sizeof(field_mask));
    std::memcpy(&other, &field_mask, sizeof(field_mask));
    fill(&block);
    fill(&other);
    Extent extent{sizeof(block), 0};
    for (size_t i = sizeof(field_mask); i < sizeof(block); ++i) {
        if (block.byte[i] != 0xa5 || other.byte[i] != 0x5a) {
            extent.begin = std::min(extent.begin, i);
            extent.end = i + 1;
        }
    }
    return extent;
}

// ---- The guard

const char PROBE_NAME[] = "zipguard"; // short enough for a transport's name

class Guard {
public:
    explicit Guard(std::string &why) : why_(why) {}

    bool run()
    {
        if (!reader_.usable()) {
            return fail("cannot open a pipe: %s", std::strerror(errno));
        }
        return class_sizes() && library_components() && operation_names() && component_slots() &&
               md_slots() && iface_slots() && internal_slots() && reachable_params() &&
               md_attributes() && registration() && transport_slots() && transport_devices() &&
               base_objects();
    }

private:
    std::string &why_;
    SafeReader reader_;
    const Words decoys_ = Words::decoys();
    std::vector<const void *> config_entries_; // nodes of the list of configuration tables

    bool fail(const char *format, ...) __attribute__((format(printf, 2, 3)))
    {
        char line[300];
        va_list args;
        va_start(args, format);
        vsnprintf(line, sizeof(line), format, args);
        va_end(args);
        why_ = line;
        return false;
    }

    bool expect(const char *what, uint64_t got, uint64_t declared)
    {
        return got == declared || fail("%s: is %#llx, declared %#llx", what,
                                       (unsigned long long)got, (unsigned long long)declared);
    }

    bool expect_pointer(const char *what, const void *got, const void *declared)
    {
        return expect(what, reinterpret_cast<uintptr_t>(got),
                      reinterpret_cast<uintptr_t>(declared));
    }

    // `call` must end in the trap at `slot` with these arguments.
    template <typename Invoke>
    bool calls(const char *function, Member slot, std::initializer_list<Arg> args, Invoke invoke)
    {
        last_call.word = NOT_CALLED;
        invoke();
        if (last_call.word == NOT_CALLED) {
            return fail("%s: %s() calls nothing", slot.name, function);
        }
        if (last_call.word != slot.word()) {
            return fail("%s: %s() calls word %zu, declared as word %zu", slot.name, function,
                        last_call.word, slot.word());
        }
        size_t i = 0;
        for (const Arg &arg : args) {
            if (i < TRAP_ARGS && !arg.any && arg.value != last_call.args[i]) {
                return fail("%s: %s() passes another argument %zu than declared", slot.name,
                            function, i + 1);
            }
            ++i;
        }
        return true;
    }

    // The function must do nothing but call the slot with its own arguments.
    template <typename Result, typename... Params>
    bool forwards(const char *function, Result (*address)(Params...), Member slot,
                  std::type_identity_t<Params>... params)
    {
        return calls(function, slot, {params...}, [&] { address(params...); });
    }

    // The same for an optional function: true without a test if this UCX has none.
    template <typename... Params>
    bool forwards(const char *function, void *address, Member slot, Params... params)
    {
        return address == nullptr ||
               forwards(function, function_at<ucs_status_t(Params...)>(address), slot, params...);
    }

    // `call` must reach the structure that only the word `pointer` leads to; other words lead to
    // decoys.
    template <typename Invoke>
    bool follows(const char *function, Member pointer, Invoke invoke)
    {
        last_call.word = NOT_CALLED;
        invoke();
        return (last_call.word != NOT_CALLED && last_call.word != DECOY) ||
               fail("%s: %s() looks for it in another word than %zu", pointer.name, function,
                    pointer.word());
    }

    // ---- 1. The library's own objects

    bool class_sizes()
    {
        ucs_class_t iface, iface_super, ep;
        if (!reader_.read(uct_base_iface_t_class_p, iface) ||
            !reader_.read(uct_base_ep_t_class_p, ep) ||
            !reader_.read(iface.superclass, iface_super)) {
            return fail("ucs_class_t: cannot be read");
        }
        if (!expect("uct_iface_ops_t size", iface_super.size, sizeof(uct_iface_t))) {
            return false;
        }
        if (ep.size != sizeof(uct_ep_t)) {
            return fail("BaseEp: %zu bytes, declared %zu; was this UCX built with --enable-stats?",
                        ep.size, sizeof(uct_ep_t));
        }
        if (ep.size > sizeof(BaseEp)) {
            return fail("BaseEp: %zu bytes, room for %zu", ep.size, sizeof(BaseEp));
        }
        if (iface.size > sizeof(BaseIface) || iface.size < offsetof(BaseIface, tail)) {
            return fail("BaseIface: %zu bytes, declared %zu with room for %zu", iface.size,
                        offsetof(BaseIface, tail), sizeof(BaseIface));
        }
        return iface_config_size();
    }

    // The table says where its fields begin, not how long the last one is.
    bool iface_config_size()
    {
        constexpr size_t LONGEST_FIELD = 64;
        constexpr size_t MOST_FIELDS = 64;
        size_t last = 0;
        const ucs_config_field_t *field = uct_iface_config_table_p;
        for (size_t i = 0; i < MOST_FIELDS; ++i, ++field) {
            ucs_config_field_t copy;
            if (!reader_.read(field, copy)) {
                return fail("IfaceConfig: the table of options cannot be read");
            }
            if (copy.name == nullptr) {
                return last + LONGEST_FIELD <= sizeof(IfaceConfig) ||
                       fail("IfaceConfig: %zu bytes and more, room for %zu", last,
                            sizeof(IfaceConfig));
            }
            if (copy.offset != UCS_CONFIG_DEPRECATED_FIELD_OFFSET) {
                last = std::max(last, copy.offset);
            }
        }
        return fail("IfaceConfig: the table of options does not end");
    }

    // What every libuct brings. Addresses are null where it does not export them.
    struct Known {
        const char *name; // of the component and of its transport
        const char *prefix;
        const void *component;
        const void *tl;
        const void *query_devices;
    };

    bool library_components()
    {
        const Known self{"self", "SELF_", nullptr, uct_self_tl_address(), nullptr};
        const Known tcp{"tcp", "TCP_", uct_tcp_component_address(), uct_tcp_tl_address(),
                        uct_tcp_query_devices_address()};
        return read_config_entries() && library_component(self) && library_component(tcp);
    }

    bool read_config_entries()
    {
        constexpr size_t MOST_ENTRIES = 10000;
        ucs_list_link_t link;
        const ucs_list_link_t *node = ucs_config_global_list_p;
        do {
            config_entries_.push_back(node);
            if (config_entries_.size() > MOST_ENTRIES || !reader_.read(node, link)) {
                return fail("ucs_config_global_list: cannot be read");
            }
            node = link.next;
        } while (node != ucs_config_global_list_p);
        return true;
    }

    // The structure with this name in a list of structures that are linked by a member; null if
    // there is none.
    const char *find_named(const ucs_list_link_t *head, Member list, Member name,
                           const char *wanted)
    {
        constexpr size_t LONGEST_LIST = 1000;
        ucs_list_link_t link;
        if (!reader_.read(head, link)) {
            return nullptr;
        }
        for (size_t i = 0; link.next != head && i < LONGEST_LIST; ++i) {
            const uintptr_t base =
                    reinterpret_cast<uintptr_t>(link.next) - list.offset; // may be wild
            if (reader_.text(reinterpret_cast<const void *>(base + name.offset)) == wanted) {
                return reinterpret_cast<const char *>(base);
            }
            if (!reader_.read(link.next, link)) {
                return nullptr;
            }
        }
        return nullptr;
    }

    // The library links its configuration tables into one list when it is loaded.
    bool config_entry(Member member, const char *base, const char *prefix)
    {
        ucs_config_global_list_entry_t entry;
        const char *address = base + member.offset;
        const void *link = address + offsetof(ucs_config_global_list_entry_t, list);
        return (std::find(config_entries_.begin(), config_entries_.end(), link) !=
                        config_entries_.end() &&
                reader_.read(address, entry) &&
                (prefix == nullptr || reader_.text(entry.prefix) == prefix)) ||
               fail("%s: is not the configuration table that libuct has registered", member.name);
    }

    bool library_component(const Known &known)
    {
        const char *base = find_named(uct_components_list_p, MEMBER(Component, list),
                                      MEMBER(Component, name), known.name);
        Component component;
        if (base == nullptr || (known.component != nullptr && base != known.component) ||
            !reader_.read(base, component)) {
            return fail("Component::list, Component::name: '%s' is not found in the library's list",
                        known.name);
        }
        const size_t size = symbol_size(base);
        if ((size != 0 && !expect("Component size", size, sizeof(Component))) ||
            !config_entry(MEMBER(Component, md_config), base, known.prefix) ||
            !config_entry(MEMBER(Component, cm_config), base, nullptr)) {
            return false;
        }
        if (!is_code(reinterpret_cast<const void *>(component.md_vfs_init))) {
            return fail("Component::md_vfs_init: is no function in component '%s'", known.name);
        }
        return library_transport(known, base);
    }

    bool library_transport(const Known &known, const char *component)
    {
        const auto *head =
                reinterpret_cast<const ucs_list_link_t *>(component + offsetof(Component, tl_list));
        const char *base = find_named(head, MEMBER(Tl, list), MEMBER(Tl, name), known.name);
        Tl tl;
        if (base == nullptr || (known.tl != nullptr && base != known.tl) ||
            !reader_.read(base, tl)) {
            return fail("Component::tl_list, Tl::list, Tl::name: '%s' is not found in the list of "
                        "its component",
                        known.name);
        }
        const auto *query_devices = reinterpret_cast<const void *>(tl.query_devices);
        if (!is_code(query_devices) ||
            (known.query_devices != nullptr && query_devices != known.query_devices)) {
            return fail("Tl::query_devices: is another word in transport '%s'", known.name);
        }
        if (!is_code(reinterpret_cast<const void *>(tl.iface_open))) {
            return fail("Tl::iface_open: is no function in transport '%s'", known.name);
        }
        const size_t size = symbol_size(base);
        return (size == 0 || expect("Tl size", size, sizeof(Tl))) &&
               config_entry(MEMBER(Tl, config), base, known.prefix);
    }

    bool operation_names()
    {
        const auto *names = static_cast<const char *const *>(uct_ep_operation_names_address());
        const char *name;
        if (names == nullptr) {
            return true;
        }
        const auto names_it = [&](int operation, const char *expected) {
            return reader_.read(names + operation, name) && reader_.text(name) == expected;
        };
        return (names_it(EP_OP_PUT_ZCOPY, "put_zcopy") ||
                fail("EP_OP_PUT_ZCOPY: %d is another operation", EP_OP_PUT_ZCOPY)) &&
               (names_it(EP_OP_GET_ZCOPY, "get_zcopy") ||
                fail("EP_OP_GET_ZCOPY: %d is another operation", EP_OP_GET_ZCOPY));
    }

    // ---- 2. Traps

    bool component_slots()
    {
        Words words = Words::traps();
        words.set_text(MEMBER(Component, name), PROBE_NAME);
        const auto component = words.as<uct_component_h>();
        uct_component_attr_t attr{};
        uct_rkey_bundle_t bundle{};
        char buffer[64] = {};
        uct_md_h md;
        uct_cm_h cm;
        void *pointer;
        int result;

        attr.field_mask = UCT_COMPONENT_ATTR_FIELD_MD_RESOURCE_COUNT;
        return calls("uct_component_query", MEMBER(Component, query_md_resources), {component},
                     [&] { uct_component_query(component, &attr); }) &&
               calls("uct_md_open", MEMBER(Component, md_open), {component, PROBE_NAME, nullptr},
                     [&] { uct_md_open(component, PROBE_NAME, nullptr, &md); }) &&
               forwards("uct_cm_open", uct_cm_open, MEMBER(Component, cm_open), component, nullptr,
                        nullptr, &cm) &&
               calls("uct_rkey_unpack", MEMBER(Component, rkey_unpack),
                     {component, buffer, ANY, &bundle.rkey, &bundle.handle},
                     [&] { uct_rkey_unpack(component, buffer, &bundle); }) &&
               calls("uct_rkey_ptr", MEMBER(Component, rkey_ptr),
                     {component, bundle.rkey, bundle.handle, ANY, &pointer},
                     [&] { uct_rkey_ptr(component, &bundle, 0, &pointer); }) &&
               calls("uct_rkey_release", MEMBER(Component, rkey_release),
                     {component, bundle.rkey, bundle.handle},
                     [&] { uct_rkey_release(component, &bundle); }) &&
               forwards("uct_rkey_compare", uct_rkey_compare_address(),
                        MEMBER(Component, rkey_compare), component, uct_rkey_t{3}, uct_rkey_t{4},
                        buffer, &result) &&
               component_data(words);
    }

    bool component_data(Words &words)
    {
        uct_component_attr_t attr{};
        attr.field_mask = UCT_COMPONENT_ATTR_FIELD_NAME | UCT_COMPONENT_ATTR_FIELD_FLAGS;
        uct_component_query(words.as<uct_component_h>(), &attr);
        const auto flags = reinterpret_cast<uintptr_t>(words.word[MEMBER(Component, flags).word()]);
        return expect("Component::flags", attr.flags, flags) &&
               (std::strncmp(attr.name, PROBE_NAME, sizeof(attr.name)) == 0 ||
                fail("Component::name: uct_component_query() reads it elsewhere"));
    }

    bool md_slots()
    {
        const Words ops = Words::traps();
        Words words = Words::all(&ops);
        const auto md = words.as<uct_md_h>();
        char buffer[256] = {};
        const uct_mem_h memh = buffer;
        const size_t length = 8;
        size_t alloc_length;
        uct_md_attr_t attr;
        uct_md_mem_attr_t mem_attr{};
        ucs_memory_type_t type;
        uct_mem_h new_memh;
        void *pointer;

        return calls("uct_md_close", MEMBER(MdOps, close), {md}, [&] { uct_md_close(md); }) &&
               calls("uct_md_query", MEMBER(MdOps, query), {md},
                     [&] { uct_md_query(md, &attr); }) &&
               forwards("uct_md_mem_alloc", uct_md_mem_alloc_address(), MEMBER(MdOps, mem_alloc),
                        md, &alloc_length, &pointer, UCS_MEMORY_TYPE_HOST, 0, 0, PROBE_NAME,
                        &new_memh) &&
               forwards("uct_md_mem_free", uct_md_mem_free_address(), MEMBER(MdOps, mem_free), md,
                        memh) &&
               forwards("uct_md_mem_advise", uct_md_mem_advise, MEMBER(MdOps, mem_advise), md, memh,
                        buffer, length, UCT_MADV_NORMAL) &&
               calls("uct_md_mem_reg", MEMBER(MdOps, mem_reg), {md, buffer, length, ANY, &new_memh},
                     [&] { uct_md_mem_reg(md, buffer, length, 0, &new_memh); }) &&
               calls("uct_md_mem_dereg", MEMBER(MdOps, mem_dereg), {md},
                     [&] { uct_md_mem_dereg(md, memh); }) &&
               forwards("uct_md_mem_reg_v2", uct_md_mem_reg_v2, MEMBER(MdOps, mem_reg), md, buffer,
                        length, reinterpret_cast<const MemRegParams *>(buffer), &new_memh) &&
               forwards("uct_md_mem_dereg_v2", uct_md_mem_dereg_v2_address(),
                        MEMBER(MdOps, mem_dereg), md, buffer) &&
               calls("uct_md_mem_query", MEMBER(MdOps, mem_query), {md, buffer, length},
                     [&] { uct_md_mem_query(md, buffer, length, &mem_attr); }) &&
               calls("uct_md_mkey_pack", MEMBER(MdOps, mkey_pack),
                     {md, memh, nullptr, SIZE_MAX, ANY, buffer},
                     [&] { uct_md_mkey_pack(md, memh, buffer); }) &&
               forwards("uct_md_mem_attach", uct_md_mem_attach_address(), MEMBER(MdOps, mem_attach),
                        md, buffer, buffer, &new_memh) &&
               forwards("uct_md_detect_memory_type", uct_md_detect_memory_type,
                        MEMBER(MdOps, detect_memory_type), md, buffer, length, &type) &&
               forwards("uct_md_mem_elem_pack", uct_md_mem_elem_pack_address(),
                        MEMBER(MdOps, mem_elem_pack), md, memh, uct_rkey_t{3}, buffer) &&
               md_words(words);
    }

    bool md_words(Words &words)
    {
        const auto md = words.as<uct_md_h>();
        Words ops = Words::traps();
        uct_md_attr_t attr{};
        words = Words::all(&decoys_);
        words.set(MEMBER(Md, ops), &ops);
        if (!follows("uct_md_query", MEMBER(Md, ops), [&] { uct_md_query(md, &attr); })) {
            return false;
        }

        // After a query that succeeds, the library adds the name of the component.
        Words component = Words::traps();
        component.set_text(MEMBER(Component, name), PROBE_NAME);
        ops.set_function(MEMBER(MdOps, query), succeed);
        words.set(MEMBER(Md, component), &component);
        uct_md_query(md, &attr);
        return std::strncmp(attr.component_name, PROBE_NAME, sizeof(attr.component_name)) == 0 ||
               fail("Md::component: uct_md_query() looks for it in another word than %zu",
                    MEMBER(Md, component).word());
    }

    static ucs_status_t succeed() { return UCS_OK; }

    // The public operations that libuct itself calls. The others lie between these, and
    // class_sizes() has compared the size of the whole.
    bool iface_slots()
    {
        Words words = Words::traps();
        Words ep_words = Words::all(&words);
        const auto iface = words.as<uct_iface_h>();
        const auto ep = ep_words.as<uct_ep_h>();
        char buffer[256] = {};
        uct_ep_params_t ep_params{};
        ep_params.field_mask = UCT_EP_PARAM_FIELD_IFACE;
        ep_params.iface = iface;
        auto *device_addr = reinterpret_cast<uct_device_addr_t *>(buffer);
        auto *iface_addr = reinterpret_cast<uct_iface_addr_t *>(buffer);
        auto *ep_addr = reinterpret_cast<uct_ep_addr_t *>(buffer);
        auto *am_short_iov = function_at<ucs_status_t(uct_ep_h, uint8_t, const void *, size_t)>(
                uct_base_ep_am_short_iov_address());
        uct_iface_attr_t attr;
        uct_ep_h new_ep;
        int fd;

        return (am_short_iov == nullptr ||
                calls("uct_base_ep_am_short_iov", MEMBER(uct_iface_ops, ep_am_short), {ep},
                      [&] { am_short_iov(ep, 0, buffer, 0); })) &&
               forwards("uct_ep_check", uct_ep_check_address(), MEMBER(uct_iface_ops, ep_check), ep,
                        0, nullptr) &&
               calls("uct_ep_create", MEMBER(uct_iface_ops, ep_create), {&ep_params, &new_ep},
                     [&] { uct_ep_create(&ep_params, &new_ep); }) &&
               forwards("uct_ep_connect", uct_ep_connect_address(),
                        MEMBER(uct_iface_ops, ep_connect), ep, buffer) &&
               forwards("uct_ep_disconnect", uct_ep_disconnect_address(),
                        MEMBER(uct_iface_ops, ep_disconnect), ep, 0) &&
               forwards("uct_ep_destroy", uct_ep_destroy, MEMBER(uct_iface_ops, ep_destroy), ep) &&
               forwards("uct_ep_get_address", uct_ep_get_address,
                        MEMBER(uct_iface_ops, ep_get_address), ep, ep_addr) &&
               forwards("uct_ep_connect_to_ep", uct_ep_connect_to_ep_address(),
                        MEMBER(uct_iface_ops, ep_connect_to_ep), ep, device_addr, ep_addr) &&
               forwards("uct_iface_accept", uct_iface_accept_address(),
                        MEMBER(uct_iface_ops, iface_accept), iface, buffer) &&
               forwards("uct_iface_reject", uct_iface_reject_address(),
                        MEMBER(uct_iface_ops, iface_reject), iface, buffer) &&
               forwards("uct_iface_event_fd_get", uct_iface_event_fd_get,
                        MEMBER(uct_iface_ops, iface_event_fd_get), iface, &fd) &&
               forwards("uct_iface_event_arm", uct_iface_event_arm,
                        MEMBER(uct_iface_ops, iface_event_arm), iface, 0) &&
               forwards("uct_iface_close", uct_iface_close, MEMBER(uct_iface_ops, iface_close),
                        iface) &&
               forwards("uct_iface_query", uct_iface_query, MEMBER(uct_iface_ops, iface_query),
                        iface, &attr) &&
               forwards("uct_iface_get_device_address", uct_iface_get_device_address,
                        MEMBER(uct_iface_ops, iface_get_device_address), iface, device_addr) &&
               forwards("uct_iface_get_address", uct_iface_get_address,
                        MEMBER(uct_iface_ops, iface_get_address), iface, iface_addr) &&
               forwards("uct_iface_is_reachable", uct_iface_is_reachable_address(),
                        MEMBER(uct_iface_ops, iface_is_reachable), iface, device_addr, iface_addr);
    }

    bool internal_slots()
    {
        const Words ops = Words::traps();
        Words words = Words::all(&ops);
        Words ep_words = Words::all(&words);
        Words params = Words::all(nullptr);
        const auto iface = words.as<uct_iface_h>();
        const auto ep = ep_words.as<uct_ep_h>();
        auto *perf = params.as<PerfAttr *>();

        const bool slots =
                forwards("uct_iface_query_v2", uct_iface_query_v2_address(),
                         MEMBER(InternalOps, iface_query_v2), iface, &params) &&
                forwards("uct_iface_estimate_perf", uct_iface_estimate_perf,
                         MEMBER(InternalOps, iface_estimate_perf), iface, perf) &&
                forwards("uct_ep_query", uct_ep_query_address(), MEMBER(InternalOps, ep_query), ep,
                         &params) &&
                forwards("uct_ep_invalidate", uct_ep_invalidate_address(),
                         MEMBER(InternalOps, ep_invalidate), ep, &params) &&
                forwards("uct_ep_connect_to_ep_v2", uct_ep_connect_to_ep_v2,
                         MEMBER(InternalOps, ep_connect_to_ep_v2), ep,
                         params.as<uct_device_addr_t *>(), params.as<uct_ep_addr_t *>(),
                         params.as<ConnectToEpParams *>()) &&
                forwards("uct_iface_is_reachable_v2", uct_iface_is_reachable_v2,
                         MEMBER(InternalOps, iface_is_reachable_v2), iface,
                         params.as<ReachableParams *>()) &&
                forwards("uct_ep_is_connected", uct_ep_is_connected,
                         MEMBER(InternalOps, ep_is_connected), ep,
                         params.as<ConnectedParams *>()) &&
                forwards("uct_ep_get_device_ep", uct_ep_get_device_ep_address(),
                         MEMBER(InternalOps, ep_get_device_ep), ep, &params) &&
                forwards("uct_ep_put_sgl_zcopy", uct_ep_put_sgl_zcopy_address(),
                         MEMBER(InternalOps, ep_put_sgl_zcopy), ep, nullptr, nullptr, nullptr,
                         nullptr, nullptr, nullptr, nullptr, size_t{0}, nullptr);

        words = Words::all(&decoys_);
        words.set(MEMBER(BaseIface, internal_ops), &ops);
        return slots && follows("uct_iface_estimate_perf", MEMBER(BaseIface, internal_ops),
                                [&] { uct_iface_estimate_perf(iface, perf); });
    }

    // An interface that keeps what its iface_is_reachable_v2 is asked.
    struct ReachableProbe {
        Words words; // the interface
        Words ep_words;
        Words ops;
        SafeReader &reader;
        ReachableParams asked;
        bool was_asked;

        explicit ReachableProbe(SafeReader &safe_reader)
            : words(Words::all(&ops)), ep_words(Words::all(&words)), ops(Words::traps()),
              reader(safe_reader)
        {
            ops.set_function(MEMBER(InternalOps, iface_is_reachable_v2), keep);
        }

        uct_iface_h iface() { return reinterpret_cast<uct_iface_h>(this); }
        uct_ep_h ep() { return ep_words.as<uct_ep_h>(); }

        static int keep(uct_iface_h iface, const ReachableParams *params)
        {
            auto *probe = reinterpret_cast<ReachableProbe *>(iface);
            probe->was_asked = probe->reader.read(params, probe->asked);
            return 1;
        }

        template <typename Invoke>
        bool asks(Invoke invoke)
        {
            was_asked = false;
            invoke();
            return was_asked;
        }
    };

    bool reachable_params()
    {
        ReachableProbe probe(reader_);
        return reachable_info_string(probe) && reachable_info_string_bit() &&
               reachable_addresses(probe) && connected_params(probe);
    }

    // uct_iface_is_reachable_v2() empties the caller's string. Any word that it takes for the
    // string points to one.
    bool reachable_info_string(ReachableProbe &probe)
    {
        constexpr uint64_t MASK =
                ReachableParams::INFO_STRING | ReachableParams::INFO_STRING_LENGTH;
        const Member field_mask = MEMBER(ReachableParams, field_mask);
        const Member string = MEMBER(ReachableParams, info_string);
        const Member length = MEMBER(ReachableParams, info_string_length);
        std::array<char, TRAPS> text;
        text.fill('x');
        Words words;
        for (size_t i = 0; i < TRAPS; ++i) {
            words.word[i] = &text[i];
        }
        words.set_number(field_mask, MASK);
        const auto empties = [&](char &first) {
            uct_iface_is_reachable_v2(probe.iface(), words.as<ReachableParams *>());
            return first == '\0';
        };
        if (!empties(text[string.word()])) {
            return fail("%s: libuct takes another word than %zu for it", string.name,
                        string.word());
        }

        // Now nothing else could be the length.
        text[0] = 'x';
        words = Words::all(nullptr);
        words.set_number(field_mask, MASK);
        words.set(string, &text[0]);
        if (empties(text[0])) {
            return fail("%s: libuct does not look at it", length.name);
        }
        words.set_number(length, 1);
        return empties(text[0]) ||
               fail("%s: libuct takes another word than %zu for it", length.name, length.word());
    }

    // This function needs no length, which tells the two bits apart.
    bool reachable_info_string_bit()
    {
        auto *valid = function_at<int(const ReachableParams *, uint64_t)>(
                uct_iface_is_reachable_params_valid_address());
        char text = 'x';
        Words words = Words::all(nullptr);
        words.set_number(MEMBER(ReachableParams, field_mask), ReachableParams::INFO_STRING);
        words.set(MEMBER(ReachableParams, info_string), &text);
        return valid == nullptr || (valid(words.as<ReachableParams *>(), 0) && text == '\0') ||
               fail("ReachableParams::INFO_STRING: libuct uses another bit");
    }

    // uct_base_iface_is_reachable() makes such a structure out of two addresses.
    bool reachable_addresses(ReachableProbe &probe)
    {
        char addresses[2];
        auto *device_addr = reinterpret_cast<uct_device_addr_t *>(&addresses[0]);
        auto *iface_addr = reinterpret_cast<uct_iface_addr_t *>(&addresses[1]);
        const bool asked = probe.asks(
                [&] { uct_base_iface_is_reachable(probe.iface(), device_addr, iface_addr); });
        return (asked || fail("uct_base_iface_is_reachable: does not ask the interface")) &&
               expect("ReachableParams::DEVICE_ADDR | IFACE_ADDR", probe.asked.field_mask,
                      ReachableParams::DEVICE_ADDR | ReachableParams::IFACE_ADDR) &&
               expect_pointer("ReachableParams::device_addr", probe.asked.device_addr,
                              device_addr) &&
               expect_pointer("ReachableParams::iface_addr", probe.asked.iface_addr, iface_addr);
    }

    // uct_base_ep_is_connected() translates one structure into the other, field by field.
    bool connected_params(ReachableProbe &probe)
    {
        auto *is_connected =
                function_at<int(uct_ep_h, const void *)>(uct_base_ep_is_connected_address());
        if (is_connected == nullptr) {
            return true;
        }
        char addresses[3];
        Words words = Words::all(nullptr);
        words.set(MEMBER(ConnectedParams, device_addr), &addresses[0]);
        words.set(MEMBER(ConnectedParams, iface_addr), &addresses[1]);
        words.set(MEMBER(ConnectedParams, ep_addr), &addresses[2]);
        const auto translates = [&](uint64_t bit) {
            words.set_number(MEMBER(ConnectedParams, field_mask), bit);
            return probe.asks([&] { is_connected(probe.ep(), &words); }) ||
                   fail("uct_base_ep_is_connected: does not ask the interface");
        };
        return translates(ConnectedParams::DEVICE_ADDR) &&
               expect("ConnectedParams::DEVICE_ADDR, ReachableParams::DEVICE_ADDR",
                      probe.asked.field_mask, ReachableParams::DEVICE_ADDR) &&
               expect_pointer("ConnectedParams::device_addr", probe.asked.device_addr,
                              &addresses[0]) &&
               translates(ConnectedParams::IFACE_ADDR) &&
               expect("ConnectedParams::IFACE_ADDR, ReachableParams::IFACE_ADDR",
                      probe.asked.field_mask, ReachableParams::IFACE_ADDR) &&
               expect_pointer("ConnectedParams::iface_addr", probe.asked.iface_addr,
                              &addresses[1]) &&
               translates(ConnectedParams::EP_ADDR) &&
               expect("ConnectedParams::EP_ADDR", probe.asked.field_mask, 0);
    }

    // ---- 3. Known contents

    // A memory domain that answers a query and keeps what it is asked to register.
    struct MdProbe {
        union {
            Md md;
            Words words;
        };
        union {
            MdOps ops;
            Words ops_words;
        };
        union {
            Component component;
            Words component_words;
        };
        SafeReader &reader;
        MdAttr attr;
        MemRegParams registered;
        MemDeregParams deregistered;

        explicit MdProbe(SafeReader &safe_reader)
            : words(Words::all(nullptr)), ops_words(Words::traps()),
              component_words(Words::traps()), reader(safe_reader), registered{}, deregistered{}
        {
            ops.query = query;
            ops.mem_reg = reg;
            ops.mem_dereg = dereg;
            component_words.set_text(MEMBER(Component, name), PROBE_NAME);
            component.tl_list = {&component.tl_list, &component.tl_list};
            md.ops = &ops;
            md.component = &component;
            attr_pattern();
        }

        uct_md_h handle() { return reinterpret_cast<uct_md_h>(this); }

        // Every field different.
        void attr_pattern()
        {
            auto *byte = reinterpret_cast<unsigned char *>(&attr);
            for (size_t i = 0; i < sizeof(attr); ++i) {
                byte[i] = static_cast<unsigned char>(1 + i % 127);
            }
            attr.reg_cost = {0.5, 0.25};
        }

        static ucs_status_t query(uct_md_h md, MdAttr *attr)
        {
            std::memcpy(static_cast<void *>(attr), &reinterpret_cast<MdProbe *>(md)->attr,
                        MEMBER(MdAttr, required_mem_flags).offset + 1);
            return UCS_OK;
        }

        static ucs_status_t reg(uct_md_h md, void *, size_t, const MemRegParams *params,
                                uct_mem_h *)
        {
            auto *probe = reinterpret_cast<MdProbe *>(md);
            return probe->reader.read(params, probe->registered) ? UCS_OK : UCS_ERR_INVALID_PARAM;
        }

        static ucs_status_t dereg(uct_md_h md, const MemDeregParams *params)
        {
            auto *probe = reinterpret_cast<MdProbe *>(md);
            return probe->reader.read(params, probe->deregistered) ? UCS_OK : UCS_ERR_INVALID_PARAM;
        }
    };

    // In the order of their bits in field_mask, from bit 0.
    static constexpr Member MD_ATTR_FIELDS[] = {
            MEMBER(MdAttr, max_alloc),
            MEMBER(MdAttr, max_reg),
            MEMBER(MdAttr, flags),
            MEMBER(MdAttr, reg_mem_types),
            MEMBER(MdAttr, reg_nonblock_mem_types),
            MEMBER(MdAttr, cache_mem_types),
            MEMBER(MdAttr, detect_mem_types),
            MEMBER(MdAttr, alloc_mem_types),
            MEMBER(MdAttr, access_mem_types),
            MEMBER(MdAttr, dmabuf_mem_types),
            MEMBER(MdAttr, reg_cost),
            MEMBER(MdAttr, component_name),
            MEMBER(MdAttr, rkey_packed_size),
            MEMBER(MdAttr, local_cpus),
            MEMBER(MdAttr, exported_mkey_packed_size),
            MEMBER(MdAttr, global_id),
            MEMBER(MdAttr, reg_alignment),
            MEMBER(MdAttr, gva_mem_types),
            MEMBER(MdAttr, required_mem_flags),
    };

    struct PerfField {
        uint64_t bit;
        Member member;
    };

    // Those that the interface fills. The ones before are the caller's.
    static constexpr PerfField PERF_ATTR_FIELDS[] = {
            {PerfAttr::SEND_PRE_OVERHEAD, MEMBER(PerfAttr, send_pre_overhead)},
            {PerfAttr::SEND_POST_OVERHEAD, MEMBER(PerfAttr, send_post_overhead)},
            {PerfAttr::RECV_OVERHEAD, MEMBER(PerfAttr, recv_overhead)},
            {PerfAttr::BANDWIDTH, MEMBER(PerfAttr, bandwidth)},
            {PerfAttr::PATH_BANDWIDTH, MEMBER(PerfAttr, path_bandwidth)},
            {PerfAttr::LATENCY, MEMBER(PerfAttr, latency)},
            {PerfAttr::MAX_INFLIGHT_EPS, MEMBER(PerfAttr, max_inflight_eps)},
            {PerfAttr::FLAGS, MEMBER(PerfAttr, flags)},
    };

    bool occupies(Member field, Extent extent)
    {
        if (extent.end == 0) {
            return fail("%s: libuct does not fill it", field.name);
        }
        return (extent.begin == field.offset && extent.end == field.offset + field.size) ||
               fail("%s: libuct fills bytes %zu to %zu, declared %zu to %zu", field.name,
                    extent.begin, extent.end, field.offset, field.offset + field.size);
    }

    bool md_attributes()
    {
        Block block;
        const Extent extent = written_by(0, block, [](Block *attr) {
            uct_md_base_md_query(reinterpret_cast<MdAttr *>(attr));
        });
        const Member last = MEMBER(MdAttr, required_mem_flags);
        if (extent.begin != sizeof(MdAttr::field_mask) || extent.end != last.offset + last.size) {
            return fail("MdAttr: libuct fills bytes %zu to %zu, declared %zu to %zu", extent.begin,
                        extent.end, sizeof(MdAttr::field_mask), last.offset + last.size);
        }
        if (sizeof(MdAttr) - extent.end >= alignof(MdAttr)) {
            return fail("MdAttr: %zu bytes declared, of which libuct knows %zu", sizeof(MdAttr),
                        extent.end);
        }
        MdAttr base;
        std::memcpy(static_cast<void *>(&base), &block, last.offset + last.size);
        if (!expect("MdAttr::max_reg default", base.max_reg, ULONG_MAX) ||
            !expect("MdAttr::reg_alignment default", base.reg_alignment, 1)) {
            return false;
        }

        MdProbe probe(reader_);
        uint64_t bit = 1;
        for (const Member &field : MD_ATTR_FIELDS) {
            const Extent filled = written_by(bit, block, [&](Block *attr) {
                uct_md_query_v2(probe.handle(), reinterpret_cast<MdAttr *>(attr));
            });
            if (!occupies(field, filled)) {
                return false;
            }
            bit <<= 1;
        }
        return md_attributes_v1(probe);
    }

    // The public query maps fields by name.
    bool md_attributes_v1(MdProbe &probe)
    {
        uct_md_attr_t attr{};
        uct_md_query(probe.handle(), &attr);
        return expect("MdAttr::max_alloc", attr.cap.max_alloc, probe.attr.max_alloc) &&
               expect("MdAttr::max_reg", attr.cap.max_reg, probe.attr.max_reg) &&
               expect("MdAttr::flags", attr.cap.flags, probe.attr.flags) &&
               expect("MdAttr::reg_mem_types", attr.cap.reg_mem_types, probe.attr.reg_mem_types) &&
               expect("MdAttr::detect_mem_types", attr.cap.detect_mem_types,
                      probe.attr.detect_mem_types) &&
               expect("MdAttr::alloc_mem_types", attr.cap.alloc_mem_types,
                      probe.attr.alloc_mem_types) &&
               expect("MdAttr::access_mem_types", attr.cap.access_mem_types,
                      probe.attr.access_mem_types) &&
               expect("MdAttr::rkey_packed_size", attr.rkey_packed_size,
                      probe.attr.rkey_packed_size) &&
               expect("MdAttr::local_cpus", attr.local_cpus.ucs_bits[0],
                      probe.attr.local_cpus.ucs_bits[0]) &&
               ((attr.reg_cost.c == probe.attr.reg_cost.c &&
                 attr.reg_cost.m == probe.attr.reg_cost.m) ||
                fail("MdAttr::reg_cost: is another field")) &&
               (std::strncmp(attr.component_name, PROBE_NAME, sizeof(attr.component_name)) == 0 ||
                fail("MdAttr::component_name: is another field"));
    }

    bool registration()
    {
        constexpr unsigned FLAGS = 0x77;
        MdProbe probe(reader_);
        char buffer[8];
        uct_mem_h memh = nullptr;
        uct_md_mem_reg(probe.handle(), buffer, sizeof(buffer), FLAGS, &memh);
        uct_md_mem_dereg(probe.handle(), buffer);
        return expect("MemRegParams::field_mask", probe.registered.field_mask, 1) &&
               expect("MemRegParams::flags", probe.registered.flags, FLAGS) &&
               expect("MemDeregParams::MEMH", probe.deregistered.field_mask,
                      MemDeregParams::MEMH) &&
               expect_pointer("MemDeregParams::memh", probe.deregistered.memh, buffer);
    }

    // A component with one transport.
    struct TransportProbe : MdProbe {
        union {
            Tl tl;
            Words tl_words;
        };

        explicit TransportProbe(SafeReader &safe_reader)
            : MdProbe(safe_reader), tl_words(Words::traps())
        {
            tl_words.set_text(MEMBER(Tl, name), PROBE_NAME);
            component.tl_list = {&tl.list, &tl.list};
            tl.list = {&component.tl_list, &component.tl_list};
        }
    };

    bool transport_slots()
    {
        TransportProbe probe(reader_);
        uct_tl_resource_desc_t *resources = nullptr;
        unsigned count = 0;
        uct_iface_params_t params{};
        params.field_mask = UCT_IFACE_PARAM_FIELD_OPEN_MODE | UCT_IFACE_PARAM_FIELD_DEVICE;
        params.open_mode = UCT_IFACE_OPEN_MODE_DEVICE;
        params.mode.device.tl_name = PROBE_NAME;
        params.mode.device.dev_name = PROBE_NAME;
        char worker, config;
        uct_iface_h iface;
        return calls("uct_md_query_tl_resources", MEMBER(Tl, query_devices), {probe.handle()},
                     [&] { uct_md_query_tl_resources(probe.handle(), &resources, &count); }) &&
               forwards("uct_iface_open", uct_iface_open, MEMBER(Tl, iface_open), probe.handle(),
                        reinterpret_cast<uct_worker_h>(&worker), &params,
                        reinterpret_cast<uct_iface_config_t *>(&config), &iface);
    }

    static constexpr unsigned DEVICES = 2; // the second shows the size of the first
    static constexpr int DEVICE_NUMBER = 5;

    // Freed by the library.
    static ucs_status_t two_devices(uct_md_h, TlDevice **devices_p, unsigned *count_p)
    {
        auto *devices = static_cast<TlDevice *>(calloc(1, sizeof(Block)));
        if (devices == nullptr) {
            return UCS_ERR_NO_MEMORY;
        }
        for (unsigned i = 0; i < DEVICES; ++i) {
            snprintf(devices[i].name, sizeof(devices[i].name), "device%u", i);
            devices[i].type = UCT_DEVICE_TYPE_ACC;
            devices[i].sys_device = DEVICE_NUMBER + i;
        }
        *devices_p = devices;
        *count_p = DEVICES;
        return UCS_OK;
    }

    bool transport_devices()
    {
        TransportProbe probe(reader_);
        probe.tl.query_devices = two_devices;
        uct_tl_resource_desc_t *resources = nullptr;
        unsigned count = 0;
        uct_md_query_tl_resources(probe.handle(), &resources, &count);
        bool good = count == DEVICES || fail("TlDevice: %u devices listed of %u", count, DEVICES);
        for (unsigned i = 0; good && i < count; ++i) {
            const uct_tl_resource_desc_t &resource = resources[i];
            char name[UCT_DEVICE_NAME_MAX];
            snprintf(name, sizeof(name), "device%u", i);
            good = (std::strncmp(resource.tl_name, PROBE_NAME, sizeof(resource.tl_name)) == 0 ||
                    fail("Tl::name: uct_md_query_tl_resources() reads it elsewhere")) &&
                   (std::strncmp(resource.dev_name, name, sizeof(name)) == 0 ||
                    fail("TlDevice::name: of device %u is read elsewhere", i)) &&
                   expect("TlDevice::type", resource.dev_type, UCT_DEVICE_TYPE_ACC) &&
                   expect("TlDevice::sys_device", resource.sys_device, DEVICE_NUMBER + i);
        }
        uct_release_tl_resource_list(resources);
        return good;
    }

    // A base interface, constructed by the library and destroyed again. The worker is stored and
    // not followed.
    class BaseIfaceProbe {
    public:
        static constexpr size_t MARGIN = 64;
        static constexpr unsigned char MARGIN_BYTE = 0xa5;

        BaseIfaceProbe() : iface{}, md_(nullptr), config_{}
        {
            std::memset(margin, MARGIN_BYTE, sizeof(margin));
            for (size_t i = 0; i < sizeof(ops) / sizeof(Trap); ++i) {
                reinterpret_cast<Trap *>(&ops)[i] = trap_table[i];
            }
            ops.iface_query = query;
            ops.iface_get_device_address = get_device_address;
            uct_iface_params_t params{};
            int init_count = 1;
            status = uct_base_iface_t_init(&iface, uct_base_iface_t_class_p, &init_count, &ops,
                                           &internal_ops, md(), worker(), &params,
                                           reinterpret_cast<uct_iface_config_t *>(&config_));
        }
        ~BaseIfaceProbe()
        {
            if (status == UCS_OK) {
                ucs_class_call_cleanup_chain(uct_base_iface_t_class_p, &iface, -1);
            }
        }
        BaseIfaceProbe(const BaseIfaceProbe &) = delete;
        BaseIfaceProbe &operator=(const BaseIfaceProbe &) = delete;

        uct_iface_h handle() { return reinterpret_cast<uct_iface_h>(&iface); }
        uct_md_h md() { return reinterpret_cast<uct_md_h>(&md_); }
        uct_worker_h worker() { return reinterpret_cast<uct_worker_h>(&config_); }

        static constexpr double OVERHEAD = 3;
        static constexpr uct_ppn_bandwidth_t BANDWIDTH{5, 7};
        static constexpr ucs_linear_func_t LATENCY{11, 13};
        static constexpr uint64_t DEVICE_ADDRESS = 0x1122334455667788;

        static ucs_status_t query(uct_iface_h, uct_iface_attr_t *attr)
        {
            attr->overhead = OVERHEAD;
            attr->bandwidth = BANDWIDTH;
            attr->latency = LATENCY;
            attr->device_addr_len = sizeof(DEVICE_ADDRESS);
            return UCS_OK;
        }

        static ucs_status_t get_device_address(uct_iface_h, uct_device_addr_t *address)
        {
            std::memcpy(static_cast<void *>(address), &DEVICE_ADDRESS, sizeof(DEVICE_ADDRESS));
            return UCS_OK;
        }

        BaseIface iface;
        unsigned char margin[MARGIN]; // that the library must leave alone
        uct_iface_ops_t ops;
        union {
            InternalOps internal_ops;
            Words internal_ops_words = Words::traps();
        };
        ucs_status_t status;

    private:
        const void *md_;
        IfaceConfig config_;
    };

    bool base_objects()
    {
        BaseIfaceProbe probe;
        if (probe.status != UCS_OK) {
            return fail("BaseIface: cannot be constructed: %s", ucs_status_string(probe.status));
        }
        const bool margin_left =
                std::all_of(std::begin(probe.margin), std::end(probe.margin),
                            [](unsigned char byte) { return byte == BaseIfaceProbe::MARGIN_BYTE; });
        return (margin_left || fail("BaseIface: libuct writes behind it")) &&
               expect_pointer("BaseIface::internal_ops", probe.iface.internal_ops,
                              &probe.internal_ops) &&
               expect_pointer("BaseIface::md", probe.iface.md, probe.md()) &&
               expect_pointer("BaseIface::worker", probe.iface.worker, probe.worker()) &&
               base_ep(probe) && iface_attributes(probe) && perf_attributes(probe) &&
               reachable_scope(probe);
    }

    // Not cleaned up: that would follow the worker, and without statistics nothing is held.
    bool base_ep(BaseIfaceProbe &probe)
    {
        BaseEp ep{};
        int init_count = 1;
        const ucs_status_t status =
                uct_base_ep_t_init(&ep, uct_base_ep_t_class_p, &init_count, &probe.iface);
        return (status == UCS_OK ||
                fail("BaseEp: cannot be constructed: %s", ucs_status_string(status))) &&
               expect_pointer("BaseEp::super", ep.super.iface, &probe.iface);
    }

    bool iface_attributes(BaseIfaceProbe &probe)
    {
        Block block;
        const Extent extent = written_by(0, block, [&](Block *attr) {
            uct_base_iface_query(&probe.iface, reinterpret_cast<uct_iface_attr_t *>(attr));
        });
        uct_iface_attr_t attr;
        std::memcpy(static_cast<void *>(&attr), &block, sizeof(attr));
        return expect("uct_iface_attr_t size", extent.end, sizeof(attr)) &&
               expect("uct_iface_attr_t::dev_num_paths", attr.dev_num_paths, 1);
    }

    bool perf_attributes(BaseIfaceProbe &probe)
    {
        Block block;
        const auto estimate = [&](Block *attr) {
            uct_base_iface_estimate_perf(probe.handle(), reinterpret_cast<PerfAttr *>(attr));
        };
        for (const PerfField &field : PERF_ATTR_FIELDS) {
            if (!occupies(field.member, written_by(field.bit, block, estimate))) {
                return false;
            }
        }
        written_by(UINT64_MAX, block, estimate);
        PerfAttr perf;
        std::memcpy(static_cast<void *>(&perf), &block, sizeof(perf));
        return (perf.send_pre_overhead == BaseIfaceProbe::OVERHEAD &&
                perf.recv_overhead == BaseIfaceProbe::OVERHEAD &&
                perf.bandwidth.dedicated == BaseIfaceProbe::BANDWIDTH.dedicated &&
                perf.bandwidth.shared == BaseIfaceProbe::BANDWIDTH.shared &&
                perf.latency.c == BaseIfaceProbe::LATENCY.c &&
                perf.latency.m == BaseIfaceProbe::LATENCY.m) ||
               fail("PerfAttr, uct_iface_attr_t: overhead, bandwidth or latency does not pass");
    }

    // Where the scope is "this device", libuct compares the device address with the interface's.
    bool reachable_scope(BaseIfaceProbe &probe)
    {
        auto *scope_is_reachable = function_at<int(uct_iface_h, const ReachableParams *)>(
                uct_iface_scope_is_reachable_address());
        if (scope_is_reachable == nullptr) {
            return true;
        }
        constexpr int DEVICE_SCOPE = 0, NETWORK_SCOPE = 1;
        const uint64_t other_device = ~BaseIfaceProbe::DEVICE_ADDRESS;
        char text[64] = "x";
        struct {
            ReachableParams params;
            char tail[64]; // for a library that knows more fields
        } reachable{};
        ReachableParams &params = reachable.params;
        params.field_mask = ReachableParams::DEVICE_ADDR | ReachableParams::SCOPE |
                            ReachableParams::INFO_STRING | ReachableParams::INFO_STRING_LENGTH;
        params.device_addr = reinterpret_cast<const uct_device_addr_t *>(&other_device);
        params.info_string = text;
        params.info_string_length = sizeof(text);
        params.scope = DEVICE_SCOPE;
        if (scope_is_reachable(probe.handle(), &params) != 0 || text[0] == 'x') {
            return fail("ReachableParams::SCOPE: libuct uses another bit");
        }
        params.scope = NETWORK_SCOPE;
        return scope_is_reachable(probe.handle(), &params) == 1 ||
               fail("ReachableParams::scope: libuct reads another word");
    }
};

} // namespace

bool layout_matches(std::string &why)
{
    return Guard(why).run();
}

} // namespace zip::ucx
