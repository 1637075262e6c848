// SPDX-License-Identifier: BSD-3-Clause
// A stack to run a function on, and switches between stacks; tells AddressSanitizer of them.
#ifndef ZIP_TEST_SIMT_FIBRE_H
#define ZIP_TEST_SIMT_FIBRE_H

#include <cstddef>
#include <memory>

namespace zip::simt::cpu {

class Fibre {
public:
    Fibre();
    ~Fibre();
    Fibre(const Fibre &) = delete;
    Fibre &operator=(const Fibre &) = delete;

    // The next resume() calls entry(argument) on this stack, whatever was on it before. entry ends
    // with finish().
    void start(void (*entry)(void *), void *argument);
    // From the scheduler's stack to the fibre, until it yields or finishes.
    void resume();
    // From the fibre back to who resumed it.
    void yield();
    [[noreturn]] void finish();

private:
    struct State;
    std::unique_ptr<State> state_;
};

} // namespace zip::simt::cpu
#endif
