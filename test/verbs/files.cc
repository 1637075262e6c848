// SPDX-License-Identifier: BSD-3-Clause
// The files that a card has: /dev/infiniband/uverbs-swN, without which UCX takes no device, and
// /sys/class/infiniband/swverbsN, where programs read state and counters.
//
// The functions of libc below answer for these paths only; every other path goes to the kernel as
// it is. They use system calls instead of the next definition in the program, so that they work
// however early they are called.
#undef _FORTIFY_SOURCE
#define _FORTIFY_SOURCE 0
#include "nic.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#define API extern "C" __attribute__((visibility("default")))

namespace {

using namespace swverbs;

enum class Kind { other, missing, character_device, directory, file };

// Whether `path` is `prefix` followed by a device's number; `rest` is what comes after that.
bool names_device(const char *path, const char *prefix, unsigned &device, const char *&rest)
{
    const size_t length = strlen(prefix);
    if (strncmp(path, prefix, length) != 0 || path[length] < '0' || path[length] > '7') {
        return false;
    }
    device = static_cast<unsigned>(path[length] - '0');
    rest = path + length + 1;
    return (*rest == 0 || *rest == '/') && device < settings().devices;
}

std::string guid_text(uint64_t guid)
{
    char text[32];
    snprintf(text, sizeof(text), "%04x:%04x:%04x:%04x", static_cast<unsigned>(guid >> 48),
             static_cast<unsigned>(guid >> 32 & 0xffff), static_cast<unsigned>(guid >> 16 & 0xffff),
             static_cast<unsigned>(guid & 0xffff));
    return text;
}

// What a file below /sys/class/infiniband/swverbsN holds now. Counters are those of this process,
// and zero before its first verbs call.
Kind content(unsigned device, std::string name, std::string &text)
{
    while (!name.empty() && name.back() == '/') {
        name.pop_back();
    }
    static const char *const directories[] = {"",
                                              "/ports",
                                              "/ports/1",
                                              "/ports/1/counters",
                                              "/ports/1/gids",
                                              "/ports/1/pkeys",
                                              "/ports/1/gid_attrs",
                                              "/ports/1/gid_attrs/types"};
    for (const char *directory : directories) {
        if (name == directory) {
            return Kind::directory;
        }
    }
    static const Port unused = {};
    const Port &port = self == nullptr ? unused : self->head.port[device];
    const bool up = port.down_until.load() == 0, ethernet = settings().ethernet;
    const uint32_t lid = port.lid.load();
    const std::string prefix = "/ports/1/";
    if (name == "/node_guid" || name == "/sys_image_guid") {
        text = guid_text(guid_of(lid));
    } else if (name == "/node_type") {
        text = "1: CA";
    } else if (name == "/node_desc") {
        text = "software verbs device";
    } else if (name == "/fw_ver") {
        text = "1.0";
    } else if (name == "/hca_type" || name == "/board_id") {
        text = "swverbs";
    } else if (name.rfind(prefix, 0) != 0) {
        return Kind::missing;
    } else if (name = name.substr(prefix.size()); name == "state") {
        text = up ? "4: ACTIVE" : "1: DOWN";
    } else if (name == "phys_state") {
        text = up ? "5: LinkUp" : "3: Disabled";
    } else if (name == "link_layer") {
        text = ethernet ? "Ethernet" : "InfiniBand";
    } else if (name == "rate") {
        char rate[64]; // in steps of the standard only verbs.cc reports it
        snprintf(rate, sizeof(rate), "%.6g Gb/sec (4X)",
                 settings().gbps > 0 ? settings().gbps * 8 : 100.0);
        text = rate;
    } else if (name == "lid") {
        char number[16];
        snprintf(number, sizeof(number), "0x%x", ethernet ? 0 : lid);
        text = number;
    } else if (name == "lid_mask_count") {
        text = "0";
    } else if (name == "sm_lid") {
        text = "0xbfff";
    } else if (name == "cap_mask") {
        text = "0x00000000";
    } else if (name == "gids/0") {
        text = "fe80:0000:0000:0000:" + guid_text(guid_of(lid));
    } else if (name == "pkeys/0") {
        text = "0xffff";
    } else if (name == "gid_attrs/types/0") {
        text = ethernet ? "RoCE v2" : "IB/RoCE v1";
    } else if (name == "counters/port_xmit_data") { // in units of four bytes, as on a card
        text = std::to_string(port.xmit_data.load() / 4);
    } else if (name == "counters/port_rcv_data") {
        text = std::to_string(port.rcv_data.load() / 4);
    } else if (name == "counters/port_xmit_packets") {
        text = std::to_string(port.xmit_packets.load());
    } else if (name == "counters/port_rcv_packets") {
        text = std::to_string(port.rcv_packets.load());
    } else if (name == "counters/port_rcv_errors" || name == "counters/port_xmit_discards" ||
               name == "counters/symbol_error" || name == "counters/link_downed") {
        text = "0";
    } else {
        return Kind::missing;
    }
    text += '\n';
    return Kind::file;
}

// `text` is made only where it is asked for: the settings are read only for the device's paths.
Kind look_up(const char *path, std::string *text)
{
    if (path == nullptr || path[0] != '/' || (path[1] != 's' && path[1] != 'd')) {
        return Kind::other;
    }
    unsigned device;
    const char *rest;
    if (names_device(path, "/dev/infiniband/uverbs-sw", device, rest)) {
        return *rest == 0 ? Kind::character_device : Kind::missing;
    }
    if (!names_device(path, "/sys/class/infiniband/swverbs", device, rest)) {
        return Kind::other;
    }
    std::string unused;
    return content(device, rest, text == nullptr ? unused : *text);
}

long refuse(int error)
{
    errno = error;
    return -1;
}

int access_path(int directory, const char *path, int mode)
{
    switch (look_up(path, nullptr)) {
    case Kind::other:
        return static_cast<int>(syscall(SYS_faccessat, directory, path, mode));
    case Kind::character_device:
        path = "/dev/null";
        break;
    case Kind::missing:
        return static_cast<int>(refuse(ENOENT));
    case Kind::directory:
        return static_cast<int>((mode & W_OK) != 0 ? refuse(EACCES) : 0);
    case Kind::file:
        return static_cast<int>((mode & (W_OK | X_OK)) != 0 ? refuse(EACCES) : 0);
    }
    return static_cast<int>(syscall(SYS_faccessat, AT_FDCWD, path, mode));
}

int stat_path(int directory, const char *path, struct stat *info, int flags)
{
    const Kind kind = look_up(path, nullptr);
    switch (kind) {
    case Kind::other:
        return static_cast<int>(syscall(SYS_newfstatat, directory, path, info, flags));
    case Kind::character_device:
        return static_cast<int>(syscall(SYS_newfstatat, AT_FDCWD, "/dev/null", info, flags));
    case Kind::missing:
        return static_cast<int>(refuse(ENOENT));
    default:
        break;
    }
    memset(info, 0, sizeof(*info));
    info->st_mode = kind == Kind::directory ? S_IFDIR | 0755 : S_IFREG | 0444;
    info->st_nlink = 1;
    info->st_size = 4096;
    info->st_blksize = 4096;
    return 0;
}

int open_path(int directory, const char *path, int flags, mode_t mode)
{
    std::string text;
    switch (look_up(path, &text)) {
    case Kind::other:
        return static_cast<int>(syscall(SYS_openat, directory, path, flags, mode));
    case Kind::character_device:
        return static_cast<int>(syscall(SYS_openat, AT_FDCWD, "/dev/null", flags, mode));
    case Kind::missing:
        return static_cast<int>(refuse(ENOENT));
    case Kind::directory:
        return static_cast<int>(refuse(EACCES));
    case Kind::file:
        break;
    }
    if ((flags & O_ACCMODE) != O_RDONLY) {
        return static_cast<int>(refuse(EACCES));
    }
    const int fd = memfd_create("swverbs", (flags & O_CLOEXEC) != 0 ? MFD_CLOEXEC : 0);
    if (fd >= 0 && (write(fd, text.data(), text.size()) < 0 || lseek(fd, 0, SEEK_SET) != 0)) {
        close(fd);
        return static_cast<int>(refuse(EIO));
    }
    return fd;
}

template <class F>
F next(const char *name)
{
    return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

FILE *open_stream(const char *path, const char *mode, const char *function)
{
    const Kind kind = look_up(path, nullptr);
    if (kind == Kind::other) {
        return next<FILE *(*)(const char *, const char *)>(function)(path, mode);
    }
    const bool reads = mode[0] == 'r' && strchr(mode, '+') == nullptr;
    const int fd = open_path(AT_FDCWD, path, reads ? O_RDONLY | O_CLOEXEC : O_RDWR | O_CLOEXEC, 0);
    return fd < 0 ? nullptr : fdopen(fd, mode);
}

// The files are no links, and their names have no other form.
char *resolve(const char *path, Kind kind, char *resolved)
{
    if (kind == Kind::missing) {
        errno = ENOENT;
        return nullptr;
    }
    if (resolved == nullptr) {
        return strdup(path);
    }
    return strcpy(resolved, path);
}

mode_t creation_mode(int flags, va_list arguments)
{
    return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
}

} // namespace

API int access(const char *path, int mode) noexcept
{
    return access_path(AT_FDCWD, path, mode);
}

API int stat(const char *path, struct stat *info) noexcept
{
    return stat_path(AT_FDCWD, path, info, 0);
}

API int stat64(const char *path, struct stat64 *info) noexcept
{
    return stat_path(AT_FDCWD, path, reinterpret_cast<struct stat *>(info), 0);
}

API int lstat(const char *path, struct stat *info) noexcept
{
    return stat_path(AT_FDCWD, path, info, AT_SYMLINK_NOFOLLOW);
}

API int lstat64(const char *path, struct stat64 *info) noexcept
{
    return stat_path(AT_FDCWD, path, reinterpret_cast<struct stat *>(info), AT_SYMLINK_NOFOLLOW);
}

API int fstatat(int directory, const char *path, struct stat *info, int flags) noexcept
{
    return stat_path(directory, path, info, flags);
}

API int fstatat64(int directory, const char *path, struct stat64 *info, int flags) noexcept
{
    return stat_path(directory, path, reinterpret_cast<struct stat *>(info), flags);
}

API int __xstat(int, const char *path, struct stat *info) noexcept
{
    return stat_path(AT_FDCWD, path, info, 0);
}

API int __xstat64(int, const char *path, struct stat64 *info) noexcept
{
    return stat_path(AT_FDCWD, path, reinterpret_cast<struct stat *>(info), 0);
}

API int __lxstat(int, const char *path, struct stat *info) noexcept
{
    return stat_path(AT_FDCWD, path, info, AT_SYMLINK_NOFOLLOW);
}

API int __lxstat64(int, const char *path, struct stat64 *info) noexcept
{
    return stat_path(AT_FDCWD, path, reinterpret_cast<struct stat *>(info), AT_SYMLINK_NOFOLLOW);
}

API int open(const char *path, int flags, ...)
{
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = creation_mode(flags, arguments);
    va_end(arguments);
    return open_path(AT_FDCWD, path, flags, mode);
}

API int open64(const char *path, int flags, ...)
{
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = creation_mode(flags, arguments);
    va_end(arguments);
    return open_path(AT_FDCWD, path, flags, mode);
}

API int openat(int directory, const char *path, int flags, ...)
{
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = creation_mode(flags, arguments);
    va_end(arguments);
    return open_path(directory, path, flags, mode);
}

API int openat64(int directory, const char *path, int flags, ...)
{
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = creation_mode(flags, arguments);
    va_end(arguments);
    return open_path(directory, path, flags, mode);
}

API int __open_2(const char *path, int flags)
{
    return open_path(AT_FDCWD, path, flags, 0);
}

API int __open64_2(const char *path, int flags)
{
    return open_path(AT_FDCWD, path, flags, 0);
}

API int __openat_2(int directory, const char *path, int flags)
{
    return open_path(directory, path, flags, 0);
}

API int __openat64_2(int directory, const char *path, int flags)
{
    return open_path(directory, path, flags, 0);
}

API FILE *fopen(const char *path, const char *mode)
{
    return open_stream(path, mode, "fopen");
}

API FILE *fopen64(const char *path, const char *mode)
{
    return open_stream(path, mode, "fopen64");
}

API char *realpath(const char *path, char *resolved) noexcept
{
    const Kind kind = look_up(path, nullptr);
    if (kind == Kind::other) {
        return next<char *(*)(const char *, char *)>("realpath")(path, resolved);
    }
    return resolve(path, kind, resolved);
}

API char *__realpath_chk(const char *path, char *resolved, size_t size)
{
    const Kind kind = look_up(path, nullptr);
    if (kind == Kind::other || strlen(path) >= size) {
        return next<char *(*)(const char *, char *, size_t)>("__realpath_chk")(path, resolved,
                                                                               size);
    }
    return resolve(path, kind, resolved);
}

static ssize_t read_link(const char *path, char *buffer, size_t size)
{
    const Kind kind = look_up(path, nullptr);
    if (kind == Kind::other) {
        return syscall(SYS_readlinkat, AT_FDCWD, path, buffer, size);
    }
    return refuse(kind == Kind::missing ? ENOENT : EINVAL);
}

API ssize_t readlink(const char *path, char *buffer, size_t size) noexcept
{
    return read_link(path, buffer, size);
}

API ssize_t __readlink_chk(const char *path, char *buffer, size_t size, size_t room)
{
    return read_link(path, buffer, size < room ? size : room);
}
