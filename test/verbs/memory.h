// SPDX-License-Identifier: BSD-3-Clause
// Memory regions: which bytes a key and an address name, and the movement of host memory between
// processes.
#pragma once

#include "fabric.h"

namespace swverbs {

// Bytes of one process, as they lie there.
struct Piece {
    uint64_t address;
    uint64_t length;
    Mr *region; // null: not registered (inline data)
};

class PieceList {
public:
    // The bytes [address, address + length) that `key` names in `slot`, if the region covers them,
    // belongs to protection domain `pd` and allows `access`.
    bool add_region(Slot &slot, uint32_t key, uint64_t address, uint64_t length, uint32_t access,
                    uint32_t pd);
    // Bytes [offset, offset + length) of a scatter/gather list.
    bool add_list(Slot &slot, const ibv_sge *sge, unsigned num_sge, uint64_t offset,
                  uint64_t length, uint32_t access, uint32_t pd);
    void add_plain(void *address, uint64_t length);

    unsigned size() const { return m_size; }
    const Piece &operator[](unsigned i) const { return m_piece[i]; }
    bool gpu() const { return m_gpu; }
    uint64_t length() const { return m_length; }

private:
    Piece m_piece[kSge + 1];
    unsigned m_size = 0;
    uint64_t m_length = 0;
    bool m_gpu = false;
};

// Copies host memory between this process and another (or itself), as many bytes as `local` has.
// 0, ESRCH if the peer is gone, EFAULT if memory is not mapped (any more).
int copy_host(Slot &peer, const PieceList &local, const PieceList &remote, bool write);

} // namespace swverbs
