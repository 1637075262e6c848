// SPDX-License-Identifier: BSD-3-Clause
// Fibres: on x86-64 a switch of a few instructions, elsewhere ucontext.
#include "simt/fibre.h"

#include <cstdint>
#include <cstdlib>
#include <new>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define FIBRE_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FIBRE_ASAN 1
#endif
#endif
#ifdef FIBRE_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace zip::simt::cpu {

namespace {

constexpr size_t STACK = 256 * 1024; // of addresses: only touched pages take memory

// Stacks, each above an inaccessible page. Those given back are kept for the next launch.
class Stacks {
public:
    Stacks() = default;
    ~Stacks()
    {
        for (char *stack : kept_)
            munmap(stack - page_, page_ + STACK);
    }
    Stacks(const Stacks &) = delete;
    Stacks &operator=(const Stacks &) = delete;

    char *take()
    {
        if (!kept_.empty()) {
            char *stack = kept_.back();
            kept_.pop_back();
            return stack;
        }
        void *map = mmap(nullptr, page_ + STACK, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
        if (map == MAP_FAILED)
            throw std::bad_alloc();
        mprotect(map, page_, PROT_NONE);
        return static_cast<char *>(map) + page_;
    }
    void give(char *stack) { kept_.push_back(stack); }

private:
    const size_t page_ = size_t(sysconf(_SC_PAGESIZE));
    std::vector<char *> kept_;
};
thread_local Stacks stacks;

#if defined(__x86_64__)

// Saves the callee's registers on the old stack, and its pointer to *save.
extern "C" void zip_fibre_switch(void **save, void *load);
asm(R"(
    .text
    .type zip_fibre_switch, @function
zip_fibre_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size zip_fibre_switch, .-zip_fibre_switch
)");

class Context {
public:
    void prepare(char *stack, size_t size, void (*entry)())
    {
        // what zip_fibre_switch pops: six registers, then the address that it returns to; a
        // function starts with the stack 8 bytes off a multiple of 16
        auto *top = reinterpret_cast<uintptr_t *>(stack + size) - 1;
        *top = 0;
        *--top = reinterpret_cast<uintptr_t>(entry);
        for (int i = 0; i < 6; ++i)
            *--top = 0;
        pointer_ = top;
    }
    static void change(Context &from, Context &to)
    {
        zip_fibre_switch(&from.pointer_, to.pointer_);
    }

private:
    void *pointer_ = nullptr;
};

#else

class Context {
public:
    void prepare(char *stack, size_t size, void (*entry)())
    {
        getcontext(&context_);
        context_.uc_stack.ss_sp = stack;
        context_.uc_stack.ss_size = size;
        context_.uc_link = nullptr;
        makecontext(&context_, entry, 0);
    }
    static void change(Context &from, Context &to) { swapcontext(&from.context_, &to.context_); }

private:
    ucontext_t context_;
};

#endif

} // namespace

struct Fibre::State {
    char *stack;
    Context own, caller;
    void (*entry)(void *) = nullptr;
    void *argument = nullptr;
    const void *caller_stack = nullptr;
    size_t caller_size = 0;

    static thread_local State *starting;
    static void trampoline();
};
thread_local Fibre::State *Fibre::State::starting;

void Fibre::State::trampoline()
{
    State *self = starting;
#ifdef FIBRE_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &self->caller_stack, &self->caller_size);
#endif
    self->entry(self->argument);
    abort(); // entry ends with finish()
}

Fibre::Fibre() : state_(new State)
{
    state_->stack = stacks.take();
}

Fibre::~Fibre()
{
    stacks.give(state_->stack);
}

void Fibre::start(void (*entry)(void *), void *argument)
{
    state_->entry = entry;
    state_->argument = argument;
#ifdef FIBRE_ASAN
    // an abandoned fibre leaves its frames' red zones
    __asan_unpoison_memory_region(state_->stack, STACK);
#endif
    state_->own.prepare(state_->stack, STACK, State::trampoline);
}

void Fibre::resume()
{
    State::starting = state_.get();
#ifdef FIBRE_ASAN
    void *fake;
    __sanitizer_start_switch_fiber(&fake, state_->stack, STACK);
#endif
    Context::change(state_->caller, state_->own);
#ifdef FIBRE_ASAN
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

void Fibre::yield()
{
#ifdef FIBRE_ASAN
    void *fake;
    __sanitizer_start_switch_fiber(&fake, state_->caller_stack, state_->caller_size);
#endif
    Context::change(state_->own, state_->caller);
#ifdef FIBRE_ASAN
    __sanitizer_finish_switch_fiber(fake, &state_->caller_stack, &state_->caller_size);
#endif
}

void Fibre::finish()
{
#ifdef FIBRE_ASAN
    __sanitizer_start_switch_fiber(nullptr, state_->caller_stack, state_->caller_size);
#endif
    Context::change(state_->own, state_->caller);
    abort();
}

} // namespace zip::simt::cpu
