// SPDX-License-Identifier: BSD-3-Clause
// An MPI program that knows nothing of what is below MPI: it exchanges floats and random bytes in
// every way that MPI offers for host memory, and compares every byte that arrives. Rank 0 prints
// one "ok" or "not ok" line a check; a failure of any rank is in it.
//   mpirun -n N mpi_exchange [CHECK...]       N even; without names: all but two_threads and
//   traffic_*; --list prints them.

#include <link.h>
#include <mpi.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

namespace {

constexpr size_t KiB = 1024;
constexpr size_t MiB = 1024 * KiB;
constexpr unsigned CHECK_SECONDS = 40; // the slowest takes 3 s on two busy cores

int rank = 0;
int ranks = 0;

// ---- verdicts

struct Failures {
    std::mutex lock; // two threads of a rank may fail
    int count = 0;
    char first[200] = "";
} failures;

[[gnu::format(printf, 2, 3)]] void expect(bool holds, const char *format, ...)
{
    if (holds) {
        return;
    }
    std::lock_guard guard(failures.lock);
    if (failures.count++ == 0) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(failures.first, sizeof(failures.first), format, arguments);
        va_end(arguments);
    }
}

const char *current_check = "start";

void on_alarm(int)
{
    char line[160];
    const int length =
            snprintf(line, sizeof(line), "not ok %s: rank %d hangs\n", current_check, rank);
    if (write(STDOUT_FILENO, line, static_cast<size_t>(length)) < 0) {
        _exit(4);
    }
    _exit(3); // mpirun then ends the other ranks
}

// Prints the verdict of all ranks on the check that has just run. Returns whether it passed.
bool verdict(const char *name, double seconds)
{
    int total = 0;
    MPI_Allreduce(&failures.count, &total, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    std::vector<char> texts(rank == 0 ? sizeof(failures.first) * static_cast<size_t>(ranks) : 0);
    MPI_Gather(failures.first, sizeof(failures.first), MPI_CHAR, texts.data(),
               sizeof(failures.first), MPI_CHAR, 0, MPI_COMM_WORLD);
    if (rank == 0) {
        printf("%s %s, %d ranks (%.1f s)\n", total == 0 ? "ok" : "not ok", name, ranks, seconds);
        for (int peer = 0; peer < ranks; peer++) {
            const char *text = texts.data() + sizeof(failures.first) * static_cast<size_t>(peer);
            if (text[0] != '\0') {
                printf("#   rank %d: %s (%d failures in all)\n", peer, text, total);
            }
        }
        fflush(stdout);
    }
    failures.count = 0;
    failures.first[0] = '\0';
    return total == 0;
}

// ---- data

// xoshiro256** 1.0 of Blackman and Vigna, seeded by splitmix64
class Random {
public:
    explicit Random(uint64_t seed)
    {
        for (uint64_t &word : m_state) {
            seed += 0x9e3779b97f4a7c15;
            uint64_t z = seed;
            z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
            z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
            word = z ^ (z >> 31);
        }
    }

    uint64_t next()
    {
        const uint64_t result = std::rotl(m_state[1] * 5, 7) * 9;
        const uint64_t shifted = m_state[1] << 17;
        m_state[2] ^= m_state[0];
        m_state[3] ^= m_state[1];
        m_state[1] ^= m_state[2];
        m_state[0] ^= m_state[3];
        m_state[2] ^= shifted;
        m_state[3] = std::rotl(m_state[3], 45);
        return result;
    }

    // two independent numbers of the normal distribution (Box and Muller)
    std::pair<float, float> normal()
    {
        const double radius = std::sqrt(-2 * std::log(uniform()));
        const double angle = 2 * M_PI * uniform();
        return {static_cast<float>(radius * std::cos(angle)),
                static_cast<float>(radius * std::sin(angle))};
    }

private:
    // in (0, 1]
    double uniform() { return (static_cast<double>(next() >> 11) + 1) * 0x1p-53; }

    uint64_t m_state[4];
};

enum class Data { BF16, FP32, BYTES };
constexpr Data KINDS[] = {Data::BF16, Data::FP32, Data::BYTES};

const char *name_of(Data data)
{
    return data == Data::BF16 ? "bf16" : data == Data::FP32 ? "fp32" : "bytes";
}

// A message is cut together from pieces of these pools: as random as they are, at the price of a
// copy.
constexpr size_t POOL_BYTES = 2 * MiB;
constexpr size_t PIECE_BYTES = 4 * KiB;
std::vector<uint8_t> pools[3];

// weights of a network: N(0, 0.02)
void fill_pools()
{
    Random random(20260417);
    for (std::vector<uint8_t> &pool : pools) {
        pool.resize(POOL_BYTES);
    }
    for (size_t at = 0; at < POOL_BYTES; at += 8) {
        const auto [first, second] = random.normal();
        const float fp32[2] = {first * 0.02f, second * 0.02f};
        memcpy(&pools[1][at], fp32, sizeof(fp32));
        const uint64_t bytes = random.next();
        memcpy(&pools[2][at], &bytes, sizeof(bytes));
        const auto [third, fourth] = random.normal();
        const float four[4] = {first * 0.02f, second * 0.02f, third * 0.02f, fourth * 0.02f};
        for (size_t i = 0; i < 4; i++) {
            const auto bf16 = static_cast<uint16_t>(std::bit_cast<uint32_t>(four[i]) >> 16);
            memcpy(&pools[0][at + 2 * i], &bf16, sizeof(bf16));
        }
    }
}

// The bytes of the message that SEED names; any rank makes the same.
void fill(uint8_t *to, size_t bytes, Data data, uint64_t seed)
{
    const std::vector<uint8_t> &pool = pools[static_cast<size_t>(data)];
    Random random(seed);
    for (size_t at = 0; at < bytes; at += PIECE_BYTES) {
        const size_t from = random.next() % ((POOL_BYTES - PIECE_BYTES) / 4) * 4;
        memcpy(to + at, &pool[from], std::min(PIECE_BYTES, bytes - at));
    }
}

void expect_message(const uint8_t *got, size_t bytes, Data data, uint64_t seed)
{
    thread_local std::vector<uint8_t> wanted;
    wanted.resize(std::max(bytes, wanted.size()));
    fill(wanted.data(), bytes, data, seed);
    if (bytes == 0 || memcmp(got, wanted.data(), bytes) == 0) {
        return;
    }
    size_t at = 0;
    while (got[at] == wanted[at]) {
        at++;
    }
    size_t wrong = 0;
    for (size_t i = at; i < bytes; i++) {
        wrong += got[i] != wanted[i];
    }
    expect(false, "%zu bytes of %s: %zu differ, the first at %zu", bytes, name_of(data), wrong, at);
}

// Memory at a distance from alignment, between guards that nobody may write.
class Buffer {
public:
    explicit Buffer(size_t bytes, size_t misaligned = 0)
        : m_bytes(bytes), m_offset(GUARD + misaligned),
          m_memory(std::make_unique_for_overwrite<uint8_t[]>(bytes + m_offset + GUARD))
    {
        memset(m_memory.get(), 0xa5, m_offset);
        memset(data(), 0x5a, bytes);
        memset(data() + bytes, 0xa5, GUARD);
    }

    ~Buffer()
    {
        const auto intact = [](const uint8_t *from, size_t bytes) {
            return std::all_of(from, from + bytes, [](uint8_t byte) { return byte == 0xa5; });
        };
        expect(intact(m_memory.get(), m_offset), "a write before a buffer of %zu bytes", m_bytes);
        expect(intact(data() + m_bytes, GUARD), "a write behind a buffer of %zu bytes", m_bytes);
    }

    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;

    uint8_t *data() { return m_memory.get() + m_offset; }
    size_t bytes() const { return m_bytes; }
    int count() const { return static_cast<int>(m_bytes); }

private:
    static constexpr size_t GUARD = 64;

    size_t m_bytes;
    size_t m_offset;
    std::unique_ptr<uint8_t[]> m_memory;
};

// about the borders that matter: eager, rendezvous, zip's smallest message, its segments
constexpr size_t SIZES[] = {0,
                            1,
                            7,
                            1000,
                            8 * KiB,
                            32 * KiB - 1,
                            32 * KiB,
                            64 * KiB + 1,
                            128 * KiB,
                            256 * KiB,
                            256 * KiB + 1,
                            500003,
                            1 * MiB,
                            1000003,
                            3 * MiB + 5,
                            4 * MiB,
                            16 * MiB};
constexpr size_t BIG_SIZES[] = {256 * KiB, 1 * MiB, 3 * MiB + 5, 16 * MiB};

constexpr uint64_t seed_of(int from, int to, size_t number)
{
    return (static_cast<uint64_t>(from) << 48) ^ (static_cast<uint64_t>(to) << 32) ^ number;
}

// the partner in all that goes in pairs
int partner()
{
    return rank ^ 1;
}

void send(Buffer &buffer, int to, int tag)
{
    MPI_Send(buffer.data(), buffer.count(), MPI_BYTE, to, tag, MPI_COMM_WORLD);
}

void receive(Buffer &buffer, int from, int tag)
{
    MPI_Status status;
    int count = -1;
    MPI_Recv(buffer.data(), buffer.count(), MPI_BYTE, from, tag, MPI_COMM_WORLD, &status);
    MPI_Get_count(&status, MPI_BYTE, &count);
    expect(count == buffer.count(), "received %d bytes of %d", count, buffer.count());
}

// ---- point to point

void ping_pong(Data data, size_t bytes, size_t misaligned, size_t number)
{
    Buffer out(bytes, misaligned);
    Buffer in(bytes, misaligned / 2);
    fill(out.data(), bytes, data, seed_of(rank, partner(), number));
    if (rank % 2 == 0) {
        send(out, partner(), 1);
        receive(in, partner(), 1);
    } else {
        receive(in, partner(), 1);
        send(out, partner(), 1);
    }
    expect_message(in.data(), bytes, data, seed_of(partner(), rank, number));
    expect_message(out.data(), bytes, data, seed_of(rank, partner(), number));
}

void send_and_receive()
{
    size_t number = 0;
    for (const Data data : KINDS) {
        for (const size_t bytes : SIZES) {
            ping_pong(data, bytes, 0, number++);
        }
    }
}

void misaligned()
{
    size_t number = 0;
    for (const Data data : KINDS) {
        for (const size_t bytes : {size_t{33333}, 300 * KiB, 1 * MiB + 1}) {
            for (const size_t distance : {1, 2, 3, 6, 17}) {
                ping_pong(data, bytes, distance, number++);
            }
        }
    }
}

// the other ways to send: synchronous, buffered, ready
void other_sends()
{
    for (const size_t bytes : BIG_SIZES) {
        Buffer out(bytes);
        Buffer in(bytes);
        fill(out.data(), bytes, Data::BF16, seed_of(rank, partner(), bytes));
        for (const int mode : {0, 1, 2}) {
            std::vector<uint8_t> attached(mode == 1 ? bytes + MPI_BSEND_OVERHEAD : 0);
            if (mode == 1) {
                MPI_Buffer_attach(attached.data(), static_cast<int>(attached.size()));
            }
            memset(in.data(), 0, bytes);
            MPI_Request request;
            MPI_Irecv(in.data(), in.count(), MPI_BYTE, partner(), 2, MPI_COMM_WORLD, &request);
            MPI_Barrier(MPI_COMM_WORLD); // what MPI_Rsend asks for
            const auto send_by = mode == 0 ? MPI_Ssend : mode == 1 ? MPI_Bsend : MPI_Rsend;
            send_by(out.data(), out.count(), MPI_BYTE, partner(), 2, MPI_COMM_WORLD);
            MPI_Wait(&request, MPI_STATUS_IGNORE);
            expect_message(in.data(), bytes, Data::BF16, seed_of(partner(), rank, bytes));
            if (mode == 1) {
                void *address;
                int size;
                MPI_Buffer_detach(&address, &size);
            }
        }
    }
}

// Sends and receives of several sizes to and from every other rank, all of them in flight at once.
void many_in_flight()
{
    constexpr size_t MESSAGES = 8;
    struct Message {
        std::unique_ptr<Buffer> out, in;
        int peer;
        Data data;
        size_t number;
    };
    for (const size_t bytes : {size_t{100}, 64 * KiB + 1, 500 * KiB, 2 * MiB + 3}) {
        std::vector<Message> messages;
        std::vector<MPI_Request> requests;
        for (int peer = 0; peer < ranks; peer++) {
            for (size_t i = 0; i < MESSAGES && peer != rank; i++) {
                const Data data = KINDS[i % 3];
                Message message{std::make_unique<Buffer>(bytes + i, i),
                                std::make_unique<Buffer>(bytes + i, i / 2), peer, data, bytes + i};
                fill(message.out->data(), bytes + i, data, seed_of(rank, peer, bytes + i));
                messages.push_back(std::move(message));
            }
        }
        for (Message &message : messages) {
            const int tag = static_cast<int>(message.number % 1000);
            MPI_Request *request = &requests.emplace_back();
            MPI_Irecv(message.in->data(), message.in->count(), MPI_BYTE, message.peer, tag,
                      MPI_COMM_WORLD, request);
        }
        for (Message &message : messages) {
            const int tag = static_cast<int>(message.number % 1000);
            MPI_Request *request = &requests.emplace_back();
            MPI_Isend(message.out->data(), message.out->count(), MPI_BYTE, message.peer, tag,
                      MPI_COMM_WORLD, request);
        }
        for (size_t done = 0; done < requests.size() / 2; done++) {
            int index;
            MPI_Waitany(static_cast<int>(requests.size()), requests.data(), &index,
                        MPI_STATUS_IGNORE);
        }
        MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
        for (Message &message : messages) {
            expect_message(message.in->data(), message.in->bytes(), message.data,
                           seed_of(message.peer, rank, message.number));
        }
    }
}

// Messages that arrive before anyone waits for them, received in another order than sent, and while
// the receiver computes.
void unexpected()
{
    constexpr size_t MESSAGES = 4;
    const size_t bytes = 1 * MiB + 11;
    std::vector<std::unique_ptr<Buffer>> out, in;
    std::vector<MPI_Request> requests(MESSAGES);
    for (size_t i = 0; i < MESSAGES; i++) {
        out.push_back(std::make_unique<Buffer>(bytes));
        in.push_back(std::make_unique<Buffer>(bytes, i));
        fill(out[i]->data(), bytes, Data::FP32, seed_of(rank, partner(), i));
        MPI_Isend(out[i]->data(), out[i]->count(), MPI_BYTE, partner(), static_cast<int>(i),
                  MPI_COMM_WORLD, &requests[i]);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(30 * (1 + rank % 2)));
    for (size_t i = MESSAGES; i-- > 0;) {
        receive(*in[i], partner(), static_cast<int>(i));
        expect_message(in[i]->data(), bytes, Data::FP32, seed_of(partner(), rank, i));
    }
    MPI_Waitall(MESSAGES, requests.data(), MPI_STATUSES_IGNORE);
}

void send_receive_ring()
{
    const int right = (rank + 1) % ranks;
    const int left = (rank + ranks - 1) % ranks;
    for (const size_t bytes : SIZES) {
        Buffer out(bytes);
        Buffer in(bytes, 5);
        fill(out.data(), bytes, Data::FP32, seed_of(rank, right, bytes));
        MPI_Sendrecv(out.data(), out.count(), MPI_BYTE, right, 3, in.data(), in.count(), MPI_BYTE,
                     left, 3, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        expect_message(in.data(), bytes, Data::FP32, seed_of(left, rank, bytes));
        MPI_Sendrecv_replace(out.data(), out.count(), MPI_BYTE, right, 4, left, 4, MPI_COMM_WORLD,
                             MPI_STATUS_IGNORE);
        expect_message(out.data(), bytes, Data::FP32, seed_of(left, rank, bytes));
    }
}

void to_itself()
{
    const size_t bytes = 1 * MiB + 1;
    Buffer out(bytes);
    Buffer in(bytes);
    fill(out.data(), bytes, Data::BF16, seed_of(rank, rank, 0));
    MPI_Request request;
    MPI_Irecv(in.data(), in.count(), MPI_BYTE, rank, 5, MPI_COMM_WORLD, &request);
    send(out, rank, 5);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    expect_message(in.data(), bytes, Data::BF16, seed_of(rank, rank, 0));
}

// the same buffers again and again, with other content each time
void persistent()
{
    for (const size_t bytes : BIG_SIZES) {
        Buffer out(bytes);
        Buffer in(bytes);
        MPI_Request requests[2];
        MPI_Send_init(out.data(), out.count(), MPI_BYTE, partner(), 6, MPI_COMM_WORLD,
                      &requests[0]);
        MPI_Recv_init(in.data(), in.count(), MPI_BYTE, partner(), 6, MPI_COMM_WORLD, &requests[1]);
        for (size_t turn = 0; turn < 4; turn++) {
            fill(out.data(), bytes, KINDS[turn % 3], seed_of(rank, partner(), turn));
            MPI_Startall(2, requests);
            MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
            expect_message(in.data(), bytes, KINDS[turn % 3], seed_of(partner(), rank, turn));
        }
        MPI_Request_free(&requests[0]);
        MPI_Request_free(&requests[1]);
    }
}

// A column of a matrix to a contiguous buffer, a contiguous buffer to a column, and column to
// column.
void derived_types()
{
    constexpr size_t ROWS = 1024;
    constexpr size_t WIDTH = 3000;  // bytes of a row
    constexpr size_t COLUMN = 1200; // bytes of it that are sent
    constexpr size_t FIRST = 808;
    MPI_Datatype column;
    MPI_Type_vector(ROWS, COLUMN, WIDTH, MPI_BYTE, &column);
    MPI_Type_commit(&column);
    for (const int way : {0, 1, 2}) {
        const bool scatters = way != 0; // at the receiver
        const bool gathers = way != 1;
        Buffer matrix_out(ROWS * WIDTH);
        Buffer matrix_in(ROWS * WIDTH);
        Buffer packed_out(ROWS * COLUMN);
        Buffer packed_in(ROWS * COLUMN);
        fill(packed_out.data(), ROWS * COLUMN, Data::BF16, seed_of(rank, partner(), 7));
        for (size_t row = 0; row < ROWS; row++) {
            memcpy(matrix_out.data() + row * WIDTH + FIRST, packed_out.data() + row * COLUMN,
                   COLUMN);
        }
        MPI_Request request;
        MPI_Irecv(scatters ? matrix_in.data() + FIRST : packed_in.data(),
                  scatters ? 1 : packed_in.count(), scatters ? column : MPI_BYTE, partner(), 7,
                  MPI_COMM_WORLD, &request);
        MPI_Send(gathers ? matrix_out.data() + FIRST : packed_out.data(),
                 gathers ? 1 : packed_out.count(), gathers ? column : MPI_BYTE, partner(), 7,
                 MPI_COMM_WORLD);
        MPI_Wait(&request, MPI_STATUS_IGNORE);
        for (size_t row = 0; row < ROWS && scatters; row++) {
            uint8_t *from = matrix_in.data() + row * WIDTH;
            memcpy(packed_in.data() + row * COLUMN, from + FIRST, COLUMN);
            const auto untouched = [](uint8_t byte) { return byte == 0x5a; };
            expect(std::all_of(from, from + FIRST, untouched) &&
                           std::all_of(from + FIRST + COLUMN, from + WIDTH, untouched),
                   "row %zu was written beside its column", row);
        }
        expect_message(packed_in.data(), ROWS * COLUMN, Data::BF16, seed_of(partner(), rank, 7));
    }
    MPI_Type_free(&column);
}

// Rank 0 learns from whom and how long by probing; all others send at once.
void probe_any_source()
{
    constexpr size_t MESSAGES = 6;
    const auto bytes_of = [](int from, size_t i) {
        return i % 3 == 0 ? i + static_cast<size_t>(from) : i * 200001 + static_cast<size_t>(from);
    };
    if (rank != 0) {
        for (size_t i = 0; i < MESSAGES; i++) {
            Buffer out(bytes_of(rank, i));
            fill(out.data(), out.bytes(), Data::FP32, seed_of(rank, 0, i));
            send(out, 0, static_cast<int>(i));
        }
        return;
    }
    std::vector<size_t> next(static_cast<size_t>(ranks));
    for (size_t i = 0; i < MESSAGES * static_cast<size_t>(ranks - 1); i++) {
        MPI_Status status;
        MPI_Message message = MPI_MESSAGE_NULL;
        if (i % 2 == 0) {
            MPI_Probe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &status);
        } else {
            MPI_Mprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &message, &status);
        }
        const int from = status.MPI_SOURCE;
        const size_t number = next[static_cast<size_t>(from)]++;
        int count = 0;
        MPI_Get_count(&status, MPI_BYTE, &count);
        expect(status.MPI_TAG == static_cast<int>(number), "rank %d: message %d overtook %zu", from,
               status.MPI_TAG, number);
        expect(static_cast<size_t>(count) == bytes_of(from, number), "rank %d: %d bytes announced",
               from, count);
        Buffer in(static_cast<size_t>(count));
        if (i % 2 == 0) {
            receive(in, from, status.MPI_TAG);
        } else {
            MPI_Mrecv(in.data(), count, MPI_BYTE, &message, MPI_STATUS_IGNORE);
        }
        expect_message(in.data(), in.bytes(), Data::FP32, seed_of(from, 0, number));
    }
}

// Two threads a rank, each with a communicator of its own.
void two_threads()
{
    int level = MPI_THREAD_SINGLE;
    MPI_Query_thread(&level);
    expect(level == MPI_THREAD_MULTIPLE, "MPI allows threads only at level %d", level);
    if (level != MPI_THREAD_MULTIPLE) {
        return;
    }
    MPI_Comm communicators[2];
    for (MPI_Comm &communicator : communicators) {
        MPI_Comm_dup(MPI_COMM_WORLD, &communicator);
    }
    std::vector<std::thread> threads;
    for (size_t thread = 0; thread < 2; thread++) {
        threads.emplace_back([thread, communicator = communicators[thread]] {
            for (size_t turn = 0; turn < 6; turn++) {
                const size_t bytes = BIG_SIZES[turn % 3] + thread;
                const Data data = KINDS[(turn + thread) % 3];
                Buffer out(bytes);
                Buffer in(bytes, thread);
                fill(out.data(), bytes, data, seed_of(rank, partner(), 2 * turn + thread));
                MPI_Request requests[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL};
                MPI_Irecv(in.data(), in.count(), MPI_BYTE, partner(), 8, communicator,
                          &requests[0]);
                if (turn % 2 == 0) {
                    MPI_Isend(out.data(), out.count(), MPI_BYTE, partner(), 8, communicator,
                              &requests[1]);
                } else {
                    MPI_Send(out.data(), out.count(), MPI_BYTE, partner(), 8, communicator);
                }
                MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
                expect_message(in.data(), bytes, data, seed_of(partner(), rank, 2 * turn + thread));
            }
        });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
    for (MPI_Comm &communicator : communicators) {
        MPI_Comm_free(&communicator);
    }
}

// ---- collectives

void broadcast()
{
    for (const Data data : KINDS) {
        for (const size_t bytes : SIZES) {
            const int root = static_cast<int>(bytes % static_cast<size_t>(ranks));
            Buffer buffer(bytes);
            if (rank == root) {
                fill(buffer.data(), bytes, data, seed_of(root, 0, bytes));
            }
            MPI_Bcast(buffer.data(), buffer.count(), MPI_BYTE, root, MPI_COMM_WORLD);
            expect_message(buffer.data(), bytes, data, seed_of(root, 0, bytes));
        }
    }
}

void all_to_all()
{
    for (const size_t bytes : {size_t{100}, 40000 * size_t{1}, 400 * KiB, 2 * MiB}) {
        const auto all = static_cast<size_t>(ranks);
        Buffer out(bytes * all);
        Buffer in(bytes * all);
        for (int peer = 0; peer < ranks; peer++) {
            fill(out.data() + bytes * static_cast<size_t>(peer), bytes, Data::BF16,
                 seed_of(rank, peer, bytes));
        }
        MPI_Alltoall(out.data(), static_cast<int>(bytes), MPI_BYTE, in.data(),
                     static_cast<int>(bytes), MPI_BYTE, MPI_COMM_WORLD);
        for (int peer = 0; peer < ranks; peer++) {
            expect_message(in.data() + bytes * static_cast<size_t>(peer), bytes, Data::BF16,
                           seed_of(peer, rank, bytes));
        }
    }
}

// every pair another size, some of them nothing
void all_to_all_uneven()
{
    const auto bytes_of = [](int from, int to) {
        return (from + to) % 3 == 0 ? 0 : 300001 * (from + 1) + 70003 * to;
    };
    const auto all = static_cast<size_t>(ranks);
    std::vector<int> out_counts(all), out_at(all), in_counts(all), in_at(all);
    for (int peer = 0; peer < ranks; peer++) {
        const auto i = static_cast<size_t>(peer);
        out_counts[i] = bytes_of(rank, peer);
        in_counts[i] = bytes_of(peer, rank);
    }
    std::exclusive_scan(out_counts.begin(), out_counts.end(), out_at.begin(), 0);
    std::exclusive_scan(in_counts.begin(), in_counts.end(), in_at.begin(), 0);
    Buffer out(static_cast<size_t>(out_at.back() + out_counts.back()));
    Buffer in(static_cast<size_t>(in_at.back() + in_counts.back()));
    for (int peer = 0; peer < ranks; peer++) {
        const auto i = static_cast<size_t>(peer);
        fill(out.data() + out_at[i], static_cast<size_t>(out_counts[i]), Data::FP32,
             seed_of(rank, peer, 9));
    }
    MPI_Alltoallv(out.data(), out_counts.data(), out_at.data(), MPI_BYTE, in.data(),
                  in_counts.data(), in_at.data(), MPI_BYTE, MPI_COMM_WORLD);
    for (int peer = 0; peer < ranks; peer++) {
        const auto i = static_cast<size_t>(peer);
        expect_message(in.data() + in_at[i], static_cast<size_t>(in_counts[i]), Data::FP32,
                       seed_of(peer, rank, 9));
    }
}

void gather_to_all()
{
    for (const size_t bytes : {size_t{4000}, 300 * KiB, 2 * MiB + 1}) {
        Buffer out(bytes);
        Buffer in(bytes * static_cast<size_t>(ranks));
        fill(out.data(), bytes, Data::BF16, seed_of(rank, 0, bytes));
        MPI_Allgather(out.data(), out.count(), MPI_BYTE, in.data(), out.count(), MPI_BYTE,
                      MPI_COMM_WORLD);
        for (int peer = 0; peer < ranks; peer++) {
            expect_message(in.data() + bytes * static_cast<size_t>(peer), bytes, Data::BF16,
                           seed_of(peer, 0, bytes));
        }
    }
}

// Multiples of 1/1024 below 8: sums of them are exact in any order.
float summand(int of, size_t at)
{
    return static_cast<float>((at * 7919 + static_cast<size_t>(of) * 104729) % 8192) / 1024;
}

void all_reduce()
{
    for (const size_t count : {size_t{1}, size_t{1000}, 64 * KiB, 1 * MiB + 3}) {
        std::vector<float> own(count), sum(count);
        for (size_t i = 0; i < count; i++) {
            own[i] = summand(rank, i);
        }
        MPI_Allreduce(own.data(), sum.data(), static_cast<int>(count), MPI_FLOAT, MPI_SUM,
                      MPI_COMM_WORLD);
        size_t wrong = 0;
        for (size_t i = 0; i < count; i++) {
            float wanted = 0;
            for (int peer = 0; peer < ranks; peer++) {
                wanted += summand(peer, i);
            }
            wrong += sum[i] != wanted;
        }
        expect(wrong == 0, "%zu of %zu sums are wrong", wrong, count);
    }
}

// ---- windows

// A window that lies in memory of the program, or in memory that MPI allocates.
class Window {
public:
    Window(size_t bytes, bool allocated) : m_own(allocated ? 0 : bytes)
    {
        if (allocated) {
            MPI_Win_allocate(static_cast<MPI_Aint>(bytes), 1, MPI_INFO_NULL, MPI_COMM_WORLD,
                             &m_data, &m_window);
        } else {
            m_data = m_own.data();
            MPI_Win_create(m_data, static_cast<MPI_Aint>(bytes), 1, MPI_INFO_NULL, MPI_COMM_WORLD,
                           &m_window);
        }
    }

    ~Window() { MPI_Win_free(&m_window); }

    Window(const Window &) = delete;
    Window &operator=(const Window &) = delete;

    uint8_t *data() { return m_data; }
    operator MPI_Win() const { return m_window; }

private:
    Buffer m_own;
    uint8_t *m_data = nullptr;
    MPI_Win m_window = MPI_WIN_NULL;
};

void put(Buffer &from, int to, size_t at, MPI_Win window)
{
    MPI_Put(from.data(), from.count(), MPI_BYTE, to, static_cast<MPI_Aint>(at), from.count(),
            MPI_BYTE, window);
}

void get(Buffer &to, int from, size_t at, MPI_Win window)
{
    MPI_Get(to.data(), to.count(), MPI_BYTE, from, static_cast<MPI_Aint>(at), to.count(), MPI_BYTE,
            window);
}

constexpr size_t WINDOW_SIZES[] = {1, 1000, 64 * KiB + 1, 1 * MiB, 4 * MiB + 3};

void window_fence()
{
    const int right = (rank + 1) % ranks;
    const int left = (rank + ranks - 1) % ranks;
    for (const bool allocated : {false, true}) {
        Window window(5 * MiB, allocated);
        for (const size_t bytes : WINDOW_SIZES) {
            for (const Data data : KINDS) {
                Buffer out(bytes, 1);
                Buffer in(bytes, 3);
                fill(out.data(), bytes, data, seed_of(rank, right, bytes));
                MPI_Win_fence(0, window);
                put(out, right, bytes % 64, window);
                MPI_Win_fence(0, window);
                expect_message(window.data() + bytes % 64, bytes, data, seed_of(left, rank, bytes));
                MPI_Win_fence(0, window);
                get(in, right, bytes % 64, window);
                MPI_Win_fence(0, window);
                expect_message(in.data(), bytes, data, seed_of(rank, right, bytes));
            }
        }
    }
}

void window_accumulate()
{
    const size_t count = 300001;
    Window window(count * sizeof(float), false);
    auto *sums = reinterpret_cast<float *>(window.data());
    for (size_t i = 0; i < count; i++) {
        sums[i] = summand(rank, i);
    }
    std::vector<float> own(count);
    for (size_t i = 0; i < count; i++) {
        own[i] = summand(rank + 1, i);
    }
    MPI_Win_fence(0, window);
    for (int peer = 0; peer < ranks; peer++) {
        MPI_Accumulate(own.data(), static_cast<int>(count), MPI_FLOAT, peer, 0,
                       static_cast<int>(count), MPI_FLOAT, MPI_SUM, window);
    }
    MPI_Win_fence(0, window);
    size_t wrong = 0;
    for (size_t i = 0; i < count; i++) {
        float wanted = summand(rank, i);
        for (int peer = 0; peer < ranks; peer++) {
            wanted += summand(peer + 1, i);
        }
        wrong += sums[i] != wanted;
    }
    expect(wrong == 0, "%zu of %zu sums are wrong", wrong, count);
}

// The others put, flush and read back what they have put, while rank 0, whose memory it is,
// computes and does not call MPI.
void window_lock_flush()
{
    const size_t share = 5 * MiB;
    Window window(share * static_cast<size_t>(ranks), false);
    const size_t at = share * static_cast<size_t>(rank);
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) {
        volatile double sink = 0;
        const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
        while (std::chrono::steady_clock::now() < end) {
            for (int i = 0; i < 1000; i++) {
                sink = sink + std::sqrt(i);
            }
        }
    } else {
        for (const size_t bytes : WINDOW_SIZES) {
            Buffer out(bytes);
            Buffer in(bytes);
            fill(out.data(), bytes, Data::BF16, seed_of(rank, 0, bytes));
            MPI_Win_lock(MPI_LOCK_SHARED, 0, 0, window);
            put(out, 0, at, window);
            MPI_Win_flush(0, window);
            get(in, 0, at, window);
            MPI_Win_flush(0, window);
            expect_message(in.data(), bytes, Data::BF16, seed_of(rank, 0, bytes));
            MPI_Win_unlock(0, window);
            // after a local flush the source may change, and the target must not see that
            MPI_Win_lock(MPI_LOCK_EXCLUSIVE, 0, 0, window);
            put(out, 0, at, window);
            MPI_Win_flush_local(0, window);
            memset(out.data(), 0xff, bytes);
            MPI_Win_unlock(0, window);
        }
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) {
        MPI_Win_lock(MPI_LOCK_SHARED, 0, 0, window);
        for (int peer = 1; peer < ranks; peer++) {
            const size_t bytes = WINDOW_SIZES[std::size(WINDOW_SIZES) - 1];
            expect_message(window.data() + share * static_cast<size_t>(peer), bytes, Data::BF16,
                           seed_of(peer, 0, bytes));
        }
        MPI_Win_unlock(0, window);
    }
}

// Under lock_all, everyone to everyone; then general active target (post, start, complete, wait)
// between partners.
void window_epochs()
{
    const size_t share = 1 * MiB + 1;
    Window window(share * static_cast<size_t>(ranks), true);
    std::vector<std::unique_ptr<Buffer>> out;
    MPI_Win_lock_all(0, window);
    for (int peer = 0; peer < ranks; peer++) {
        out.push_back(std::make_unique<Buffer>(share));
        fill(out.back()->data(), share, Data::FP32, seed_of(rank, peer, 10));
        put(*out.back(), peer, share * static_cast<size_t>(rank), window);
    }
    MPI_Win_flush_all(window);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_sync(window);
    for (int peer = 0; peer < ranks; peer++) {
        expect_message(window.data() + share * static_cast<size_t>(peer), share, Data::FP32,
                       seed_of(peer, rank, 10));
    }
    MPI_Win_unlock_all(window);

    MPI_Group world, other;
    const int member = partner();
    MPI_Comm_group(MPI_COMM_WORLD, &world);
    MPI_Group_incl(world, 1, &member, &other);
    fill(out[0]->data(), share, Data::BF16, seed_of(rank, partner(), 11));
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_post(other, 0, window);
    MPI_Win_start(other, 0, window);
    put(*out[0], partner(), 0, window);
    MPI_Win_complete(window);
    MPI_Win_wait(window);
    expect_message(window.data(), share, Data::BF16, seed_of(partner(), rank, 11));
    MPI_Group_free(&other);
    MPI_Group_free(&world);
}

// A counter at rank 0 that everyone increments, and one that everyone swaps.
void window_atomics()
{
    constexpr int64_t TURNS = 50;
    Window window(16, true);
    memset(window.data(), 0, 16);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_lock_all(0, window);
    int64_t last = -1;
    for (int64_t turn = 0; turn < TURNS; turn++) {
        const int64_t one = 1;
        int64_t before = -1;
        MPI_Fetch_and_op(&one, &before, MPI_INT64_T, 0, 0, MPI_SUM, window);
        MPI_Win_flush(0, window);
        expect(before > last, "the counter went from %ld to %ld", static_cast<long>(last),
               static_cast<long>(before));
        last = before;
    }
    const int64_t mine = rank + 1;
    const int64_t free = 0;
    int64_t owner = -1;
    MPI_Compare_and_swap(&mine, &free, &owner, MPI_INT64_T, 0, 8, window);
    MPI_Win_flush(0, window);
    MPI_Win_unlock_all(window);
    MPI_Barrier(MPI_COMM_WORLD);
    int winners = owner == 0 ? 1 : 0;
    MPI_Allreduce(MPI_IN_PLACE, &winners, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    expect(winners == 1, "%d ranks won the swap", winners);
    if (rank == 0) {
        int64_t values[2];
        MPI_Win_lock(MPI_LOCK_SHARED, 0, 0, window);
        memcpy(values, window.data(), sizeof(values));
        MPI_Win_unlock(0, window);
        expect(values[0] == TURNS * ranks, "the counter is %ld", static_cast<long>(values[0]));
    }
    MPI_Barrier(MPI_COMM_WORLD);
}

// Two copies of UCX in one process would talk past each other, and a check of one of them would
// prove nothing.
void one_ucx()
{
    for (const char *library : {"/libucp", "/libucs"}) {
        std::pair<const char *, int> found{library, 0};
        dl_iterate_phdr(
                [](dl_phdr_info *info, size_t, void *argument) {
                    auto *wanted = static_cast<std::pair<const char *, int> *>(argument);
                    const char *name = strstr(info->dlpi_name, wanted->first);
                    const size_t length = strlen(wanted->first);
                    // libucs.so.0, libucs-14c218c5.so.0.0.0; not libucs_signal.so
                    wanted->second +=
                            name != nullptr && (name[length] == '.' || name[length] == '-');
                    return 0;
                },
                &found);
        expect(found.second == 1, "%d copies of %s in this process", found.second, library + 1);
    }
}

// ---- one kind of traffic only, for a look at what carried it: even ranks send TRAFFIC messages of
// TRAFFIC_BYTES to odd ones

constexpr size_t TRAFFIC = 6;
constexpr size_t TRAFFIC_BYTES = 4 * MiB;

void traffic_of(bool blocking_send, bool blocking_receive)
{
    Buffer buffer(TRAFFIC_BYTES);
    for (size_t i = 0; i < TRAFFIC; i++) {
        MPI_Request request = MPI_REQUEST_NULL;
        if (rank % 2 == 0) {
            fill(buffer.data(), TRAFFIC_BYTES, Data::BF16, seed_of(rank, partner(), i));
            if (blocking_send) {
                send(buffer, partner(), 12);
            } else {
                MPI_Isend(buffer.data(), buffer.count(), MPI_BYTE, partner(), 12, MPI_COMM_WORLD,
                          &request);
            }
        } else if (blocking_receive) {
            receive(buffer, partner(), 12);
        } else {
            MPI_Irecv(buffer.data(), buffer.count(), MPI_BYTE, partner(), 12, MPI_COMM_WORLD,
                      &request);
        }
        MPI_Wait(&request, MPI_STATUS_IGNORE);
        if (rank % 2 == 1) {
            expect_message(buffer.data(), TRAFFIC_BYTES, Data::BF16, seed_of(partner(), rank, i));
        }
    }
}

void traffic_send_recv()
{
    traffic_of(true, true);
}
void traffic_send_irecv()
{
    traffic_of(true, false);
}
void traffic_isend_recv()
{
    traffic_of(false, true);
}
void traffic_isend_irecv()
{
    traffic_of(false, false);
}

void traffic_put()
{
    Window window(TRAFFIC * TRAFFIC_BYTES, false);
    std::vector<std::unique_ptr<Buffer>> out;
    MPI_Win_fence(0, window);
    for (size_t i = 0; i < TRAFFIC && rank % 2 == 0; i++) {
        out.push_back(std::make_unique<Buffer>(TRAFFIC_BYTES));
        fill(out[i]->data(), TRAFFIC_BYTES, Data::BF16, seed_of(rank, partner(), i));
        put(*out[i], partner(), i * TRAFFIC_BYTES, window);
    }
    MPI_Win_fence(0, window);
    for (size_t i = 0; i < TRAFFIC && rank % 2 == 1; i++) {
        expect_message(window.data() + i * TRAFFIC_BYTES, TRAFFIC_BYTES, Data::BF16,
                       seed_of(partner(), rank, i));
    }
}

struct Check {
    const char *name;
    void (*body)();
    bool in_all = true;
};

constexpr Check CHECKS[] = {
        {"send_and_receive", send_and_receive},
        {"misaligned", misaligned},
        {"other_sends", other_sends},
        {"many_in_flight", many_in_flight},
        {"unexpected", unexpected},
        {"send_receive_ring", send_receive_ring},
        {"to_itself", to_itself},
        {"persistent", persistent},
        {"derived_types", derived_types},
        {"probe_any_source", probe_any_source},
        {"two_threads", two_threads, false},
        {"broadcast", broadcast},
        {"all_to_all", all_to_all},
        {"all_to_all_uneven", all_to_all_uneven},
        {"gather_to_all", gather_to_all},
        {"all_reduce", all_reduce},
        {"window_fence", window_fence},
        {"window_accumulate", window_accumulate},
        {"window_lock_flush", window_lock_flush},
        {"window_epochs", window_epochs},
        {"window_atomics", window_atomics},
        {"one_ucx", one_ucx},
        {"traffic_send_recv", traffic_send_recv, false},
        {"traffic_send_irecv", traffic_send_irecv, false},
        {"traffic_isend_recv", traffic_isend_recv, false},
        {"traffic_isend_irecv", traffic_isend_irecv, false},
        {"traffic_put", traffic_put, false},
};

bool selected(const Check &check, int names, char **name)
{
    const auto is_it = [&](const char *wanted) { return strcmp(wanted, check.name) == 0; };
    return names == 0 ? check.in_all : std::any_of(name, name + names, is_it);
}

} // namespace

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "--list") == 0) {
        for (const Check &check : CHECKS) {
            puts(check.name);
        }
        return 0;
    }
    for (int i = 1; i < argc; i++) {
        const auto is_it = [&](const Check &check) { return strcmp(check.name, argv[i]) == 0; };
        if (std::none_of(std::begin(CHECKS), std::end(CHECKS), is_it)) {
            fprintf(stderr, "mpi_exchange: no check %s; --list prints their names\n", argv[i]);
            return 2;
        }
    }
    signal(SIGALRM, on_alarm);
    alarm(CHECK_SECONDS);
    int threads = MPI_THREAD_SINGLE;
    // Only what needs threads asks for them: they change which transports and osc components Open
    // MPI and UCX take.
    const bool wants_threads = std::any_of(argv + 1, argv + argc, [](const char *name) {
        return strcmp(name, "two_threads") == 0;
    });
    MPI_Init_thread(&argc, &argv, wants_threads ? MPI_THREAD_MULTIPLE : MPI_THREAD_SINGLE,
                    &threads);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (ranks % 2 != 0) {
        fprintf(stderr, "mpi_exchange: an even number of ranks is needed, not %d\n", ranks);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    fill_pools();
    bool passed = true;
    for (const Check &check : CHECKS) {
        if (!selected(check, argc - 1, argv + 1)) {
            continue;
        }
        current_check = check.name;
        alarm(CHECK_SECONDS);
        const auto start = std::chrono::steady_clock::now();
        check.body();
        const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
        passed &= verdict(check.name, time.count());
    }
    current_check = "MPI_Finalize";
    alarm(CHECK_SECONDS);
    MPI_Finalize();
    return passed ? 0 : 1;
}
