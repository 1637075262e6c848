// SPDX-License-Identifier: BSD-3-Clause
// Memory regions: checks and the movement of host memory.
#include "memory.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

namespace swverbs {

bool PieceList::add_region(Slot &slot, uint32_t key, uint64_t address, uint64_t length,
                           uint32_t access, uint32_t pd)
{
    Mr &mr = slot.mr[key % kMrs];
    if (key == 0 || mr.key.load() != key || mr.pd != pd || (mr.access & access) != access ||
        address < mr.iova || length > mr.length || address - mr.iova > mr.length - length) {
        return false;
    }
    m_piece[m_size++] = {mr.va + (address - mr.iova), length, &mr};
    m_length += length;
    m_gpu = m_gpu || mr.allocation != 0;
    return true;
}

bool PieceList::add_list(Slot &slot, const ibv_sge *sge, unsigned num_sge, uint64_t offset,
                         uint64_t length, uint32_t access, uint32_t pd)
{
    for (unsigned i = 0; i < num_sge && length != 0; i++) {
        if (offset >= sge[i].length) {
            offset -= sge[i].length;
            continue;
        }
        const uint64_t part = std::min<uint64_t>(length, sge[i].length - offset);
        if (!add_region(slot, sge[i].lkey, sge[i].addr + offset, part, access, pd)) {
            return false;
        }
        length -= part;
        offset = 0;
    }
    return true;
}

void PieceList::add_plain(void *address, uint64_t length)
{
    m_piece[m_size++] = {reinterpret_cast<uintptr_t>(address), length, nullptr};
    m_length += length;
}

int copy_host(Slot &peer, const PieceList &local, const PieceList &remote, bool write)
{
    iovec l[kSge + 1], r[kSge + 1];
    for (unsigned i = 0; i < local.size(); i++) {
        l[i] = {reinterpret_cast<void *>(local[i].address), local[i].length};
    }
    for (unsigned i = 0; i < remote.size(); i++) {
        r[i] = {reinterpret_cast<void *>(remote[i].address), remote[i].length};
    }
    const auto wanted = static_cast<ssize_t>(local.length());
    if (wanted == 0) {
        return 0;
    }
    // also for this process itself: what is not mapped is then an error, not a signal
    const auto pid = static_cast<pid_t>(peer.head.pid.load(std::memory_order_relaxed));
    const ssize_t moved = write ? process_vm_writev(pid, l, local.size(), r, remote.size(), 0)
                                : process_vm_readv(pid, l, local.size(), r, remote.size(), 0);
    if (moved == wanted) {
        return 0;
    }
    return moved < 0 ? errno : EFAULT;
}

} // namespace swverbs
