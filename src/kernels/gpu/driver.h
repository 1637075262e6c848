// SPDX-License-Identifier: BSD-3-Clause
// What the launcher needs of a GPU's driver. One implementation for CUDA, one for HIP, and one for
// tests that runs kernels on the CPU.
#ifndef ZIP_KERNELS_GPU_DRIVER_H
#define ZIP_KERNELS_GPU_DRIVER_H

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/codec.h"
#include "kernels/gpu/job.h"

namespace zip::gpu {

constexpr size_t ERROR_TEXT_SIZE = 512;
// Keeps the text as the calling thread's last error and returns `status`.
zip_status_t fail(zip_status_t status, const char *pattern, ...)
        __attribute__((format(printf, 2, 3)));
// The calling thread's last error; never null.
const char *error_text();
// Keeps it, whatever fails while this lives: for what is cleaned up after an error.
class ErrorKept {
public:
    ErrorKept();
    ~ErrorKept();
    ErrorKept(const ErrorKept &) = delete;
    ErrorKept &operator=(const ErrorKept &) = delete;

private:
    char text_[ERROR_TEXT_SIZE];
};

// A kernel of the image; job.h says what they are and how they are named. All kernels can be
// counted: the number of one is below KERNELS.
struct Kernel {
    enum class Action : uint8_t { ENCODE, DECODE, PROBE, COLUMNS };
    Action action;
    bool few;             // for a limit of multiprocessors
    bool whole;           // for whole tiles alone
    uint8_t dtype, shape; // 0, 0: of stored chunks; and PROBE's

    constexpr bool codes() const { return action == Action::ENCODE || action == Action::DECODE; }
};
constexpr uint32_t CODERS = 2 * 2 * 2 * format::DTYPES * format::SHAPES,
                   KERNELS = CODERS + 1 + format::DTYPES;
constexpr uint32_t number_of(Kernel k)
{
    if (k.action == Kernel::Action::PROBE)
        return CODERS;
    if (k.action == Kernel::Action::COLUMNS)
        return CODERS + 1 + k.dtype;
    return (((uint32_t(k.whole) * 2 + uint32_t(k.few)) * 2 + uint32_t(k.action)) * format::DTYPES +
            k.dtype) *
                   format::SHAPES +
           k.shape;
}
constexpr Kernel kernel_of(uint32_t number)
{
    if (number == CODERS)
        return {Kernel::Action::PROBE, false, false, 0, 0};
    if (number > CODERS)
        return {Kernel::Action::COLUMNS, false, false, uint8_t(number - CODERS - 1),
                format::SHAPE_COLUMNS};
    const uint32_t shape = number % format::SHAPES, rest = number / format::SHAPES;
    const uint32_t dtype = rest % format::DTYPES, which = rest / format::DTYPES;
    return {Kernel::Action(which % 2), (which & 2) != 0, (which & 4) != 0, uint8_t(dtype),
            uint8_t(shape)};
}
// Whether the image has it. What is stored has no shape, and is copied by one kernel on any number
// of multiprocessors; shape dense has none for few of them.
constexpr bool exists(Kernel k)
{
    if (k.action == Kernel::Action::PROBE)
        return true;
    const bool stored = k.dtype == format::DTYPE_BYTES;
    if (stored ? k.shape != format::SHAPE_STORED : !format::valid_coding({k.dtype, k.shape, false}))
        return false;
    if (k.whole && (stored || k.dtype == format::DTYPE_FP64))
        return false;
    const bool whole_few = k.shape == format::SHAPE_22228 || k.shape == format::SHAPE_38;
    return !k.few || (!stored && k.shape != format::SHAPE_DENSE && (!k.whole || whole_few));
}
std::string name_of(Kernel k);

struct DeviceInfo {
    uint32_t multiprocessors;
    uint32_t shared_bytes; // shared memory of a multiprocessor
    uint32_t few_threads;  // of a block of the kernels for few multiprocessors
};

// Loads the kernels into the context that is current when it is made. All functions that return a
// status have said with fail() what went wrong. But for enter() and leave() they are called between
// these two; any thread may call, one queue's streams and events by one thread at a time.
class Driver {
public:
    virtual ~Driver() = default;

    // Makes the own context current in the calling thread, and the one before again.
    virtual zip_status_t enter() = 0;
    virtual void leave() = 0;

    virtual const DeviceInfo &info() const = 0;

    virtual zip_status_t stream_create(void **stream_p) = 0;
    virtual void stream_destroy(void *stream) = 0;
    virtual zip_status_t stream_synchronize(void *stream) = 0;
    // Whether all that was put on the stream is done.
    virtual zip_status_t stream_query(void *stream, bool *done_p) = 0;
    virtual zip_status_t event_create(void **event_p) = 0;
    virtual void event_destroy(void *event) = 0;
    virtual zip_status_t event_record(void *event, void *stream) = 0;
    // Whether all before the event is done; of one that was never recorded: true.
    virtual zip_status_t event_query(void *event, bool *done_p) = 0;

    virtual zip_status_t allocate_device(size_t size, void **memory_p) = 0;
    virtual void free_device(void *memory) = 0;
    virtual zip_status_t allocate_pinned(size_t size, void **memory_p) = 0;
    virtual void free_pinned(void *memory) = 0;
    virtual zip_status_t pin(void *memory, size_t size) = 0;
    virtual void unpin(void *memory) = 0;
    virtual zip_status_t dmabuf(void *device_memory, size_t size, int *fd_p) = 0;
    virtual zip_status_t clear(void *device_memory, size_t size, void *stream) = 0;
    virtual zip_status_t copy_to_device(void *device_memory, const void *pinned, size_t size,
                                        void *stream) = 0;
    // Between any two kinds of memory.
    virtual zip_status_t copy(void *to, const void *from, size_t size, void *stream) = 0;
    // Writes a word of pinned memory after all that is on the stream before.
    virtual zip_status_t write(uint64_t *word, uint64_t value, void *stream) = 0;

    // `filling`: with so much dynamic shared memory that a multiprocessor holds one block.
    virtual zip_status_t launch(Kernel kernel, uint32_t blocks, uint32_t threads, bool filling,
                                void *stream, const Launch &launch) = 0;
};

} // namespace zip::gpu
#endif
