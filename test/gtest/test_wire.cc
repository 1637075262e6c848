// SPDX-License-Identifier: BSD-3-Clause
// A hostile peer: it speaks to a zip interface through the transport below, says what no zip would,
// and must get an endpoint error for it, while other endpoints go on. All in one process, on UCT.
#include "ucx_pair.h"

#include "kernels/codec.h"
#include "uct/zip/zip_wire.h"

#include <uct/api/uct.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <deque>
#include <random>

namespace zip::test {
namespace {

using namespace zip::wire;

TEST(Wire, ReadTakesNoMoreThanThereIs)
{
    const unsigned char bytes[64] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    Header header;
    EXPECT_FALSE(read(bytes, 0, header));
    EXPECT_FALSE(read(bytes, sizeof(header) - 1, header));
    EXPECT_TRUE(read(bytes, sizeof(header), header));
    EXPECT_EQ(0x0807060504030201u, header.to);
    EXPECT_TRUE(read(bytes + 1, sizeof(header) + 5, header)) << "misaligned";
    EXPECT_EQ(0x0908070605040302u, header.to);
}

TEST(Wire, VersionsMatchOnlyIfAllIsEqual)
{
    EXPECT_TRUE(Version{}.matches());
    EXPECT_FALSE((Version{MAGIC + 1, PROTOCOL_VERSION, CODEC_VERSION}.matches()));
    EXPECT_FALSE((Version{MAGIC, PROTOCOL_VERSION + 1, CODEC_VERSION}.matches()));
    EXPECT_FALSE((Version{MAGIC, PROTOCOL_VERSION, CODEC_VERSION + 1}.matches()));
}

TEST(Wire, TransportsHaveDifferentIds)
{
    const char *names[] = {"tcp", "posix", "sysv", "rc_verbs", "rc_mlx5", "dc_mlx5", "srd", "ud"};
    for (const char *a : names) {
        for (const char *b : names) {
            EXPECT_EQ(a == b, transport_id(a) == transport_id(b)) << a << " " << b;
        }
    }
}

// ---- UCT objects

void require(ucs_status_t status, const char *what)
{
    if (status != UCS_OK) {
        printf("%s: %s\n", what, ucs_status_string(status));
        fflush(stdout);
        _Exit(3);
    }
}

struct Async {
    Async()
    {
        require(ucs_async_context_create(UCS_ASYNC_MODE_THREAD_SPINLOCK, &context), "async");
    }
    ~Async() { ucs_async_context_destroy(context); }
    ucs_async_context_t *context;
};

// A transport's interface with domain and worker of its own.
class Interface {
public:
    Interface(const std::string &transport, const char *device)
    {
        require(uct_worker_create(async_.context, UCS_THREAD_MODE_SINGLE, &worker), "worker");
        uct_component_h *components;
        unsigned count;
        require(uct_query_components(&components, &count), "uct_query_components");
        for (unsigned i = 0; i < count && iface == nullptr; ++i) {
            open(components[i], transport, device);
        }
        uct_release_component_list(components);
        require(iface != nullptr ? UCS_OK : UCS_ERR_NO_DEVICE, transport.c_str());
        require(uct_iface_query(iface, &attr), "uct_iface_query");
        uct_iface_progress_enable(iface, UCT_PROGRESS_SEND | UCT_PROGRESS_RECV);
        device_address = std::string(attr.device_addr_len, 0);
        address = std::string(attr.iface_addr_len, 0);
        require(uct_iface_get_device_address(
                        iface, reinterpret_cast<uct_device_addr_t *>(device_address.data())),
                "device address");
        if (attr.iface_addr_len > 0) {
            require(uct_iface_get_address(iface,
                                          reinterpret_cast<uct_iface_addr_t *>(address.data())),
                    "address");
        }
    }
    ~Interface()
    {
        uct_iface_close(iface);
        uct_worker_destroy(worker);
        uct_md_close(md);
    }
    Interface(const Interface &) = delete;
    Interface &operator=(const Interface &) = delete;

    uct_component_h component = nullptr;
    uct_md_h md = nullptr;
    uct_worker_h worker = nullptr;
    uct_iface_h iface = nullptr;
    uct_iface_attr_t attr = {};
    std::string device_address, address;
    std::map<uct_ep_h, std::vector<ucs_status_t>> errors; // of endpoints, as reported

private:
    void open(uct_component_h candidate, const std::string &transport, const char *device)
    {
        uct_component_attr_t component_attr = {};
        component_attr.field_mask = UCT_COMPONENT_ATTR_FIELD_MD_RESOURCE_COUNT;
        require(uct_component_query(candidate, &component_attr), "uct_component_query");
        std::vector<uct_md_resource_desc_t> mds(component_attr.md_resource_count);
        component_attr.field_mask = UCT_COMPONENT_ATTR_FIELD_MD_RESOURCES;
        component_attr.md_resources = mds.data();
        require(uct_component_query(candidate, &component_attr), "uct_component_query");
        for (const uct_md_resource_desc_t &resource : mds) {
            uct_md_config_t *config;
            require(uct_md_config_read(candidate, nullptr, nullptr, &config), "md config");
            const ucs_status_t status = uct_md_open(candidate, resource.md_name, config, &md);
            uct_config_release(config);
            if (status != UCS_OK) {
                continue;
            }
            uct_tl_resource_desc_t *tls;
            unsigned count;
            require(uct_md_query_tl_resources(md, &tls, &count), "tl resources");
            for (unsigned i = 0; i < count && iface == nullptr; ++i) {
                if (transport == tls[i].tl_name && strcmp(device, tls[i].dev_name) == 0) {
                    open_iface(transport, device);
                }
            }
            uct_release_tl_resource_list(tls);
            if (iface != nullptr) {
                component = candidate;
                return;
            }
            uct_md_close(md);
            md = nullptr;
        }
    }

    void open_iface(const std::string &transport, const char *device)
    {
        uct_iface_config_t *config;
        require(uct_md_iface_config_read(md, transport.c_str(), nullptr, nullptr, &config),
                "iface config");
        uct_iface_params_t params = {};
        params.field_mask = UCT_IFACE_PARAM_FIELD_OPEN_MODE | UCT_IFACE_PARAM_FIELD_DEVICE |
                            UCT_IFACE_PARAM_FIELD_ERR_HANDLER |
                            UCT_IFACE_PARAM_FIELD_ERR_HANDLER_ARG |
                            UCT_IFACE_PARAM_FIELD_ERR_HANDLER_FLAGS;
        params.open_mode = UCT_IFACE_OPEN_MODE_DEVICE;
        params.mode.device.tl_name = transport.c_str();
        params.mode.device.dev_name = device;
        params.err_handler_arg = this;
        params.err_handler = [](void *arg, uct_ep_h ep, ucs_status_t status) {
            static_cast<Interface *>(arg)->errors[ep].push_back(status);
            return UCS_OK;
        };
        require(uct_iface_open(md, worker, &params, config, &iface), "uct_iface_open");
        uct_config_release(config);
    }

    Async async_;
};

// A key as it is packed: that of the domain below follows.
struct PackedRkey : Rkey {
    char lower[192] = {};
};

struct Memory {
    Memory(Interface &of, size_t length, bool exported = true) : interface(of), buffer(length)
    {
        require(uct_md_mem_reg(of.md, buffer.data(), length, UCT_MD_MEM_ACCESS_ALL, &memh), "reg");
        if (exported) {
            require(uct_md_mkey_pack(of.md, memh, &key), "mkey_pack");
        }
    }
    ~Memory() { uct_md_mem_dereg(interface.md, memh); }
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;

    uint64_t address() { return reinterpret_cast<uint64_t>(buffer.data()); }

    Interface &interface;
    Buffer buffer;
    uct_mem_h memh = nullptr;
    PackedRkey key = {};
};

// Memory of the enemy, which has the key that transports of its kind need, if any.
struct LowerMemory {
    LowerMemory(Interface &of, size_t length) : interface(of), buffer(length)
    {
        uct_md_attr_t attr;
        require(uct_md_query(of.md, &attr), "uct_md_query");
        if ((attr.cap.flags & UCT_MD_FLAG_NEED_RKEY) != 0) {
            require(uct_md_mem_reg(of.md, buffer.data(), length, UCT_MD_MEM_ACCESS_ALL, &memh),
                    "reg");
            key.resize(attr.rkey_packed_size);
            require(uct_md_mkey_pack(of.md, memh, key.data()), "mkey_pack");
        }
    }
    ~LowerMemory()
    {
        if (memh != nullptr) {
            uct_md_mem_dereg(interface.md, memh);
        }
    }
    LowerMemory(const LowerMemory &) = delete;
    LowerMemory &operator=(const LowerMemory &) = delete;

    Interface &interface;
    Buffer buffer;
    uct_mem_h memh = nullptr;
    std::string key;
};

// Progress until `done`. False: out of patience. By the clock, for what the kernel carries takes as
// many rounds as others leave it no processor.
bool progress_until(const std::function<void()> &progress, const std::function<bool()> &done)
{
    const auto deadline = std::chrono::steady_clock::now() + Worker::PATIENCE;
    Idle idle;
    while (!done()) {
        if (std::chrono::steady_clock::now() > deadline) {
            return false;
        }
        progress();
        idle.round();
    }
    return true;
}

// Two zip endpoints that get along.
class HonestPair {
public:
    HonestPair(Interface &a, Interface &b) : a_(a), b_(b), target_(b, LENGTH)
    {
        eps_[0] = create(a);
        eps_[1] = create(b);
        connect(eps_[0], a, eps_[1], b);
        connect(eps_[1], b, eps_[0], a);
        require(uct_rkey_unpack(b.component, &target_.key, &rkey_), "uct_rkey_unpack");
    }
    ~HonestPair()
    {
        uct_rkey_release(b_.component, &rkey_);
        uct_ep_destroy(eps_[0]);
        uct_ep_destroy(eps_[1]);
    }
    HonestPair(const HonestPair &) = delete;
    HonestPair &operator=(const HonestPair &) = delete;

    void check(const std::function<void()> &progress)
    {
        target_.buffer.clear();
        Buffer source(LENGTH, Data::FP32, ++seed_);
        uct_iov_t iov = {source.data(), LENGTH, nullptr, 0, 1};
        uct_completion_t done = {[](uct_completion_t *) {}, 2, UCS_OK};
        ucs_status_t status =
                uct_ep_put_zcopy(eps_[0], &iov, 1, target_.address(), rkey_.rkey, &done);
        EXPECT_TRUE(status == UCS_OK || status == UCS_INPROGRESS) << ucs_status_string(status);
        progress_until(progress, [&] {
            status = uct_ep_flush(eps_[0], 0, nullptr);
            return status != UCS_INPROGRESS;
        });
        EXPECT_EQ(UCS_OK, status) << "the other endpoint does not work any more";
        EXPECT_TRUE(target_.buffer.holds(Data::FP32, seed_));
    }

    static uct_ep_h create(Interface &of)
    {
        uct_ep_params_t params = {};
        params.field_mask = UCT_EP_PARAM_FIELD_IFACE;
        params.iface = of.iface;
        uct_ep_h ep;
        require(uct_ep_create(&params, &ep), "uct_ep_create");
        return ep;
    }

private:
    static constexpr size_t LENGTH = 300001;

    static void connect(uct_ep_h ep, Interface &, uct_ep_h peer, Interface &of_peer)
    {
        std::string address(of_peer.attr.ep_addr_len, 0);
        auto *ep_address = reinterpret_cast<uct_ep_addr_t *>(address.data());
        require(uct_ep_get_address(peer, ep_address), "uct_ep_get_address");
        require(uct_ep_connect_to_ep(
                        ep,
                        reinterpret_cast<const uct_device_addr_t *>(of_peer.device_address.data()),
                        ep_address),
                "uct_ep_connect_to_ep");
    }

    Interface &a_, &b_;
    Memory target_;
    uct_ep_h eps_[2] = {};
    uct_rkey_bundle_t rkey_ = {};
    uint64_t seed_ = 0;
};

// The victim, an interface of zip, and the enemy, one of the transport below.
class Battle {
public:
    explicit Battle(const Wire &wire)
        : victim("zip", wire.device), friend_of_victim("zip", wire.device),
          enemy(wire.transport, wire.device), pair(friend_of_victim, victim),
          pair_out(victim, friend_of_victim)
    {
        for (uint8_t type = 0; type < MESSAGE_TYPE_LAST; ++type) {
            handlers_[type] = {this, type};
            require(uct_iface_set_am_handler(enemy.iface, type, on_message, &handlers_[type], 0),
                    "uct_iface_set_am_handler");
        }
        // behind the victim's own address is that of the transport below
        IfaceAddress head = {};
        EXPECT_TRUE(read(victim.address.data(), victim.address.size(), head));
        to_endpoints_ = head.connect == 1;
        if (!to_endpoints_) {
            uct_ep_params_t params = {};
            const std::string lower = victim.address.substr(sizeof(head), head.lower_length);
            params.field_mask = UCT_EP_PARAM_FIELD_IFACE | UCT_EP_PARAM_FIELD_DEV_ADDR |
                                UCT_EP_PARAM_FIELD_IFACE_ADDR;
            params.iface = enemy.iface;
            params.dev_addr =
                    reinterpret_cast<const uct_device_addr_t *>(victim.device_address.data());
            params.iface_addr = reinterpret_cast<const uct_iface_addr_t *>(lower.data());
            require(uct_ep_create(&params, &to_victim_), "uct_ep_create of the enemy");
        }
        new_endpoint();
    }
    ~Battle()
    {
        if (ep != nullptr) {
            uct_ep_destroy(ep);
        }
        progress(200);
        uct_ep_destroy(to_victim_);
    }
    Battle(const Battle &) = delete;
    Battle &operator=(const Battle &) = delete;

    // Another endpoint of the victim, connected to the enemy.
    void new_endpoint()
    {
        if (ep != nullptr) {
            uct_ep_destroy(ep);
            victim.errors.erase(ep);
            progress(50);
        }
        ep = HonestPair::create(victim);
        std::string address(victim.attr.ep_addr_len, 0);
        require(uct_ep_get_address(ep, reinterpret_cast<uct_ep_addr_t *>(address.data())),
                "uct_ep_get_address");
        EpAddress head;
        EXPECT_TRUE(read(address.data(), address.size(), head));
        id = head.id;
        std::string own = enemy.address;
        if (to_endpoints_) {
            if (to_victim_ != nullptr) {
                uct_ep_destroy(to_victim_);
            }
            to_victim_ = HonestPair::create(enemy);
            own = std::string(enemy.attr.ep_addr_len, 0);
            require(uct_ep_get_address(to_victim_, reinterpret_cast<uct_ep_addr_t *>(own.data())),
                    "uct_ep_get_address of the enemy");
        }
        EpAddress forged{};
        forged.lower_length = static_cast<uint8_t>(own.size());
        forged.id = ENEMY_ID;
        own = std::string(reinterpret_cast<const char *>(&forged), sizeof(forged)) + own;
        require(uct_ep_connect_to_ep(
                        ep,
                        reinterpret_cast<const uct_device_addr_t *>(enemy.device_address.data()),
                        reinterpret_cast<const uct_ep_addr_t *>(own.data())),
                "uct_ep_connect_to_ep");
        if (to_endpoints_) {
            const std::string lower = address.substr(sizeof(head), head.lower_length);
            require(uct_ep_connect_to_ep(to_victim_,
                                         reinterpret_cast<const uct_device_addr_t *>(
                                                 victim.device_address.data()),
                                         reinterpret_cast<const uct_ep_addr_t *>(lower.data())),
                    "uct_ep_connect_to_ep of the enemy");
        }
        received.clear();
    }

    // How those below are connected.
    bool to_endpoints() const { return to_endpoints_; }

    void progress(unsigned rounds = 1)
    {
        for (unsigned i = 0; i < rounds; ++i) {
            uct_worker_progress(victim.worker);
            uct_worker_progress(friend_of_victim.worker);
            uct_worker_progress(enemy.worker);
            if (to_endpoints_) {
                usleep(1); // or what connects and carries in the background would get no time
            }
        }
    }
    bool progress_until(const std::function<bool()> &done)
    {
        return test::progress_until([this] { progress(); }, done);
    }

    void send(uint8_t type, const void *data, size_t length)
    {
        message_ = std::string(static_cast<const char *>(data), length);
        ssize_t sent;
        progress_until([&] {
            sent = uct_ep_am_bcopy(
                    to_victim_, type,
                    [](void *to, void *arg) {
                        const auto *message = static_cast<std::string *>(arg);
                        memcpy(to, message->data(), message->size());
                        return message->size();
                    },
                    &message_, 0);
            return sent != UCS_ERR_NO_RESOURCE;
        });
        ASSERT_EQ(ssize_t(length), sent);
        progress(30);
    }
    template <class T>
    void send(uint8_t type, const T &head, const std::string &tail = {})
    {
        const std::string message =
                std::string(reinterpret_cast<const char *>(&head), sizeof(head)) + tail;
        send(type, message.data(), message.size());
    }

    // The next message of `type` from the victim.
    bool receive(uint8_t type, std::string &message)
    {
        return progress_until([&] {
            for (auto it = received.begin(); it != received.end(); ++it) {
                if (it->first == type) {
                    message = it->second;
                    received.erase(it);
                    return true;
                }
            }
            return false;
        });
    }

    // Asks for slots, and writes down where they are.
    std::vector<uint32_t> get_slots(uint32_t wanted, Grant &grant)
    {
        Request request{};
        request.header.to = id;
        request.wanted = wanted;
        send(REQUEST, request);
        std::string message;
        EXPECT_TRUE(receive(GRANT, message));
        EXPECT_TRUE(read(message.data(), message.size(), grant));
        std::vector<uint32_t> slots(grant.count);
        EXPECT_GE(message.size(), sizeof(grant) + grant.count * sizeof(uint32_t));
        memcpy(slots.data(), message.data() + sizeof(grant), grant.count * sizeof(uint32_t));
        return slots;
    }

    // The ring is in this process.
    static char *slot_memory(const Grant &grant, uint32_t slot)
    {
        return reinterpret_cast<char *>(grant.ring_address + uint64_t(slot) * grant.slot_size);
    }

    // The victim's endpoint has failed once, has told the enemy, and others work.
    void expect_endpoint_error(const char *what)
    {
        SCOPED_TRACE(what);
        progress_until([this] { return !victim.errors[ep].empty(); });
        progress(100);
        EXPECT_EQ(1u, victim.errors[ep].size()) << "no endpoint error, or several";
        for (ucs_status_t status : victim.errors[ep]) {
            EXPECT_TRUE(UCS_STATUS_IS_ERR(status) && status != UCS_ERR_NO_RESOURCE)
                    << ucs_status_string(status);
        }
        EXPECT_EQ(1u, victim.errors.size()) << "errors on other endpoints";
        pair.check([this] { progress(); });
        new_endpoint();
    }
    void expect_nothing(const char *what)
    {
        SCOPED_TRACE(what);
        progress(100);
        EXPECT_TRUE(victim.errors[ep].empty());
        pair.check([this] { progress(); });
    }

    static constexpr uint64_t ENEMY_ID = 0xdeadbeef12345678;
    Interface victim, friend_of_victim, enemy;
    HonestPair pair, pair_out;
    uct_ep_h ep = nullptr; // of the victim
    uint64_t id = 0;       // of `ep`
    std::deque<std::pair<uint8_t, std::string>> received;

private:
    struct Handler {
        Battle *battle;
        uint8_t type;
    };
    static ucs_status_t on_message(void *arg, void *data, size_t length, unsigned)
    {
        const auto *handler = static_cast<const Handler *>(arg);
        handler->battle->received.emplace_back(handler->type,
                                               std::string(static_cast<char *>(data), length));
        return UCS_OK;
    }

    std::array<Handler, MESSAGE_TYPE_LAST> handlers_;
    bool to_endpoints_ = false;
    uct_ep_h to_victim_ = nullptr;
    std::string message_;
};

class HostilePeer : public testing::TestWithParam<Wire> {
protected:
    // Runs `attack` in a process that has the plugin.
    static void run_battle(const std::function<void(Battle &)> &attack, const Env &more = {})
    {
        const Wire &wire = GetParam();
        Processes alone(wire.env +
                        Env{{"UCX_ZIP_TLS", wire.transport}, {"UCX_ZIP_SEG_SIZE", "16k"}} + more);
        alone.run([&](Channel &) {
            Battle battle(wire);
            battle.pair.check([&] { battle.progress(); });
            attack(battle);
            battle.pair.check([&] { battle.progress(); });
            battle.pair_out.check([&] { battle.progress(); });
        });
    }
};
class Addresses : public HostilePeer {};

Segment segment_for(const Battle &battle, Memory &memory, uint64_t length)
{
    Segment segment{};
    segment.header.to = battle.id;
    segment.sequence = 1;
    segment.region = memory.key.region;
    segment.address = memory.address();
    segment.length = length;
    segment.encoded_length = static_cast<uint32_t>(length);
    segment.slot = Segment::INLINE;
    return segment;
}

TEST_P(HostilePeer, MayDoWhatAnHonestOneDoes) // else the rest would say nothing
{
    run_battle([](Battle &battle) {
        Memory memory(battle.victim, 1000);
        Buffer data(1000, Data::RANDOM, 1);
        battle.send(SEGMENT, segment_for(battle, memory, 1000), std::string(data.data(), 1000));
        std::string message;
        Ack ack;
        ASSERT_TRUE(battle.receive(ACK, message));
        ASSERT_TRUE(read(message.data(), message.size(), ack));
        EXPECT_EQ(Battle::ENEMY_ID, ack.header.to);
        EXPECT_EQ(1u, ack.sequence);
        EXPECT_TRUE(memory.buffer.holds(Data::RANDOM, 1));

        Grant grant;
        const std::vector<uint32_t> slots = battle.get_slots(1, grant);
        ASSERT_EQ(1u, slots.size());
        size_t encoded;
        fill(data.data(), 1000, Data::BF16, 2);
        ASSERT_EQ(ZIP_OK, zip_codec_encode({ZIP_DTYPE_BF16, ZIP_SHAPE_DEFAULT, 0}, data.data(),
                                           1000, Battle::slot_memory(grant, slots[0]),
                                           grant.slot_size, &encoded));
        Segment segment = segment_for(battle, memory, 1000);
        segment.sequence = 2;
        segment.slot = slots[0];
        segment.encoded_length = static_cast<uint32_t>(encoded);
        battle.send(SEGMENT, segment);
        ASSERT_TRUE(battle.receive(ACK, message));
        EXPECT_TRUE(memory.buffer.holds(Data::BF16, 2));
        battle.expect_nothing("honest");
    });
}

TEST_P(HostilePeer, UnknownEndpointsAreNothingToIt)
{
    run_battle([](Battle &battle) {
        std::mt19937_64 random(1);
        for (uint8_t type = 0; type < 32; ++type) {
            for (size_t length : {0, 1, 7, 8, 20, 1000}) {
                std::string message(length, 0);
                for (char &c : message) {
                    c = static_cast<char>(random());
                }
                battle.send(type, message.data(), message.size());
            }
        }
        battle.expect_nothing("messages for nobody");
    });
}

TEST_P(HostilePeer, TruncatedMessagesAreRefused)
{
    run_battle([](Battle &battle) {
        const struct {
            MessageType type;
            size_t size;
        } types[] = {{REQUEST, sizeof(Request)}, {GRANT, sizeof(Grant)},
                     {SEGMENT, sizeof(Segment)}, {ACK, sizeof(Ack)},
                     {RETURN, sizeof(Ack)},      {GET, sizeof(Get)},
                     {DECLINE, sizeof(Decline)}, {RECALL, sizeof(Recall)}};
        for (const auto &type : types) {
            for (size_t length : {sizeof(Header), type.size - 1}) {
                std::string message(length, 0);
                memcpy(message.data(), &battle.id, sizeof(battle.id));
                battle.send(type.type, message.data(), message.size());
                battle.expect_endpoint_error("truncated");
            }
        }
        const Header header{battle.id};
        for (const unsigned ring : {0u, MAX_RINGS - 1, 255u}) {
            battle.send(RECALL, Recall{{battle.id}, static_cast<uint8_t>(ring)});
        }
        battle.expect_nothing("recall of nothing");
        battle.send(REFUSE, header);
        battle.expect_endpoint_error("truncated refusal");
        for (uint8_t type = MESSAGE_TYPE_LAST; type < 32; ++type) {
            battle.send(type, Header{battle.id});
        }
        battle.expect_nothing("messages of no type");
    });
}

TEST_P(HostilePeer, SegmentsForMemoryThatIsNotItsToWriteAreRefused)
{
    run_battle([](Battle &battle) {
        Memory memory(battle.victim, 1000), secret(battle.victim, 1000, false);
        const std::string data(1000, 'x');
        const auto attack = [&](const char *what, const std::function<void(Segment &)> &change) {
            Segment segment = segment_for(battle, memory, data.size());
            change(segment);
            battle.send(SEGMENT, segment, data);
            battle.expect_endpoint_error(what);
        };
        attack("unknown region", [](Segment &s) { s.region ^= 1; });
        attack("region 0", [](Segment &s) { s.region = 0; });
        attack("before the region", [](Segment &s) { --s.address; });
        attack("beyond the region", [](Segment &s) { ++s.address; });
        attack("far away", [](Segment &s) { s.address = ~0ull - 500; });
        attack("address 0", [](Segment &s) { s.address = 0; });
        attack("end of the address space", [](Segment &s) { s.address = ~0ull; });
        attack("another region's address", [&](Segment &s) { s.address = secret.address(); });
        attack("length of 2^64-1", [](Segment &s) { s.length = ~0ull; });
        attack("length that wraps around", [](Segment &s) { s.length = 0 - s.address; });
        attack("longer than the message", [](Segment &s) { s.length = s.encoded_length = 1001; });
        attack("lengths that differ", [](Segment &s) { s.encoded_length = 7; });
        attack("sequence 0", [](Segment &s) { s.sequence = 0; });
        attack("a sequence ahead", [](Segment &s) { s.sequence = 2; });
        attack("last sequence", [](Segment &s) { s.sequence = ~0ull; });
        attack("slot 0, not lent", [](Segment &s) { s.slot = 0; });
        attack("a slot that does not exist", [](Segment &s) { s.slot = 0xfffffffd; });
        Buffer untouched(1000);
        EXPECT_EQ(0, memcmp(untouched.data(), memory.buffer.data(), 1000)) << "something written";
        EXPECT_EQ(0, memcmp(untouched.data(), secret.buffer.data(), 1000)) << "something written";

        // one that was accepted, again
        battle.send(SEGMENT, segment_for(battle, memory, data.size()), data);
        std::string message;
        EXPECT_TRUE(battle.receive(ACK, message));
        battle.send(SEGMENT, segment_for(battle, memory, data.size()), data);
        battle.expect_endpoint_error("replayed segment");

        // a region that is no more
        uint64_t region;
        {
            Memory gone(battle.victim, 1000);
            region = gone.key.region;
        }
        attack("a region that is gone", [&](Segment &s) { s.region = region; });
    });
}

TEST_P(HostilePeer, RingsAndPlacesThatThereAreNotAreRefused)
{
    run_battle([](Battle &battle) {
        for (const unsigned ring : {1u, 5u, MAX_RINGS - 1, MAX_RINGS, 255u}) {
            battle.send(REQUEST, Request{{battle.id}, 1, static_cast<uint8_t>(ring), {}});
            battle.expect_endpoint_error("slots for a GPU that there is not");
        }
        Memory memory(battle.victim, 1000), secret(battle.victim, 1000, false);
        const auto attack = [&](const char *what, Memory &of, uint64_t offset, uint64_t length) {
            Segment segment = {};
            segment.header.to = battle.id;
            segment.sequence = 1;
            segment.region = of.key.region;
            segment.address = of.address() + offset;
            segment.length = length;
            segment.slot = Segment::PLACED;
            battle.send(SEGMENT, segment);
            battle.expect_endpoint_error(what);
        };
        attack("put where nothing was exported", secret, 0, 10);
        attack("put beyond the end", memory, 991, 10);
        attack("put before the beginning", memory, ~uint64_t{0}, 10);
        attack("put as long as memory", memory, 1, ~uint64_t{0});
    });
}

TEST_P(HostilePeer, GetsOfMemoryThatIsNotItsToReadAreRefused)
{
    run_battle([](Battle &battle) {
        Memory memory(battle.victim, 1000), secret(battle.victim, 1000, false);
        fill(memory.buffer.data(), 1000, Data::RANDOM, 3);
        const auto get_for = [&](uint64_t length) {
            Get get = {};
            get.header.to = battle.id;
            get.region = memory.key.region;
            get.address = memory.address();
            get.length = length;
            get.to_region = 77;
            get.to_address = 88;
            return get;
        };
        const auto attack = [&](const char *what, const std::function<void(Get &)> &change) {
            Get get = get_for(1000);
            change(get);
            battle.send(GET, get);
            battle.expect_endpoint_error(what);
        };
        attack("unknown region", [](Get &g) { g.region ^= 1; });
        attack("region 0", [](Get &g) { g.region = 0; });
        attack("before the region", [](Get &g) { --g.address; });
        attack("beyond the region", [](Get &g) { ++g.address; });
        attack("one byte more", [](Get &g) { ++g.length; });
        attack("nothing", [](Get &g) { g.length = 0; });
        attack("a tail longer than all", [](Get &g) { g.tail = 1001; });
        attack("a key that there is not", [](Get &g) { g.key_length = 8; });
        attack("far away", [](Get &g) { g.address = ~0ull - 500; });
        attack("length of 2^64-1", [](Get &g) { g.length = ~0ull; });
        attack("length that wraps around", [](Get &g) { g.length = 0 - g.address; });
        attack("another region's address", [&](Get &g) { g.address = secret.address(); });
        attack("memory that was not exported", [&](Get &g) {
            g.region = secret.key.region;
            g.address = secret.address();
        });
        uint64_t gone;
        {
            Memory other(battle.victim, 1000);
            gone = other.key.region;
        }
        attack("a region that is gone", [&](Get &g) { g.region = gone; });

        // what an honest peer asks for
        std::string message;
        battle.send(GET, get_for(1000));
        ASSERT_TRUE(battle.receive(SEGMENT, message));
        Segment answer;
        ASSERT_TRUE(read(message.data(), message.size(), answer));
        EXPECT_EQ(77u, answer.region);
        EXPECT_EQ(88u, answer.address);
        EXPECT_EQ(1000u, answer.length);
        EXPECT_EQ(0, memcmp(message.data() + sizeof(answer), memory.buffer.data(), 1000));

        battle.send(DECLINE, Decline{{battle.id}, 77});
        battle.expect_endpoint_error("answer to what was not asked");

        // more at once than is answered: none of these fits a message, and no slot is lent
        Memory large(battle.victim, 100000);
        for (unsigned i = 0; i < 100; ++i) {
            Get get = get_for(100000);
            get.region = large.key.region;
            get.address = large.address();
            battle.send(GET, get);
        }
        battle.expect_endpoint_error("a flood of gets");
    });
}

TEST_P(HostilePeer, CorruptChunksAreRefused)
{
    run_battle([](Battle &battle) {
        constexpr size_t LENGTH = 16000;
        Memory memory(battle.victim, LENGTH);
        Buffer data(LENGTH, Data::BF16, 1);
        std::mt19937_64 random(2);
        unsigned refused = 0;
        for (unsigned round = 0; round < 60; ++round) {
            Grant grant;
            const std::vector<uint32_t> slots = battle.get_slots(1, grant);
            ASSERT_EQ(1u, slots.size()) << "slots were lost";
            char *slot = Battle::slot_memory(grant, slots[0]);
            size_t encoded;
            ASSERT_EQ(ZIP_OK, zip_codec_encode({ZIP_DTYPE_BF16, ZIP_SHAPE_DEFAULT, 0}, data.data(),
                                               LENGTH, slot, grant.slot_size, &encoded));
            Segment segment = segment_for(battle, memory, LENGTH);
            segment.slot = slots[0];
            segment.encoded_length = static_cast<uint32_t>(encoded);
            bool must_fail = true;
            switch (round % 6) {
            case 0:
                memset(slot, 0, encoded);
                break;
            case 1:
                for (size_t i = 0; i < encoded; ++i) {
                    slot[i] = static_cast<char>(random());
                }
                break;
            case 2:
                segment.encoded_length = static_cast<uint32_t>(random() % encoded);
                break;
            case 3:
                segment.encoded_length = round % 12 == 3 ? grant.slot_size + 1 : 0xffffffff;
                break;
            case 4:
                segment.length = LENGTH - 1; // not what the chunk says
                break;
            default: // one bit anywhere: wrong data at worst, never beyond the region
                slot[random() % encoded] ^= static_cast<char>(1 << random() % 8);
                must_fail = false;
            }
            battle.send(SEGMENT, segment);
            battle.progress(50);
            if (must_fail || !battle.victim.errors[battle.ep].empty()) {
                battle.expect_endpoint_error("corrupt chunk");
                ++refused;
            } else {
                battle.new_endpoint();
            }
        }
        EXPECT_GE(refused, 50u);
    });
}

// The victim sends, the enemy receives.
TEST_P(HostilePeer, GrantsAndAcknowledgementsOutOfThinAirAreRefused)
{
    run_battle([](Battle &battle) {
        LowerMemory memory(battle.enemy, 4 * 20480);
        const std::string &rkey = memory.key;
        const auto grant_with = [&](const std::function<void(Grant &)> &change,
                                    std::vector<uint32_t> slots = {0}) {
            Grant grant{};
            grant.header.to = battle.id;
            grant.ring_address = 0x1000;
            grant.slot_size = 20480;
            grant.slot_count = 4;
            grant.count = static_cast<uint32_t>(slots.size());
            grant.rkey_length = static_cast<uint32_t>(rkey.size());
            change(grant);
            battle.send(GRANT, grant,
                        std::string(reinterpret_cast<char *>(slots.data()), slots.size() * 4) +
                                rkey);
            battle.expect_endpoint_error("grant");
        };
        grant_with([](Grant &g) { g.count = 0; });
        grant_with([](Grant &g) { g.count = 0xffffffff; });
        grant_with([](Grant &g) { g.count = 0x40000001; });
        grant_with([](Grant &g) { g.count = 2; });
        grant_with([](Grant &g) { g.slot_size = 0; });
        grant_with([](Grant &g) { g.slot_size = 16; });
        grant_with([](Grant &g) { g.slot_count = 0; });
        grant_with([](Grant &g) { g.rkey_length = 0xffffffff; });
        grant_with([](Grant &g) { g.rkey_length = 4; });
        grant_with([](Grant &) {}, {4});
        grant_with([](Grant &) {}, {0xffffffff});
        grant_with([](Grant &) {}, {0, 1, 2, 3, 0});
        grant_with([](Grant &) {}, std::vector<uint32_t>(65, 1));

        const auto ack_with = [&](uint64_t sequence, uint32_t count, size_t slots) {
            battle.send(ACK, Ack{{battle.id}, sequence, count}, std::string(slots * 4, 0));
            battle.expect_endpoint_error("acknowledgement");
        };
        ack_with(1, 0, 0);
        ack_with(~0ull, 0, 0);
        ack_with(0, 1, 1); // of no ring
        ack_with(0, 0xffffffff, 0);
        ack_with(0, 3, 1);
        ack_with(0, 65, 65);

        battle.send(RETURN, Ack{{battle.id}, 0, 1}, std::string(4, 0));
        battle.expect_endpoint_error("return of a slot that was not lent");
        battle.send(RETURN, Ack{{battle.id}, 0, 0xffffffff}, std::string(4, 0));
        battle.expect_endpoint_error("return of too many");
        Request request{};
        for (uint32_t wanted : {0u, 65u, 0xffffffffu}) {
            request.header.to = battle.id;
            request.wanted = wanted;
            battle.send(REQUEST, request);
            battle.expect_endpoint_error("request");
        }
        for (int32_t status : {0, 1, 100, int(UCS_ERR_NO_RESOURCE), int(UCS_ERR_BUSY), -1000,
                               int(UCS_ERR_CANCELED)}) {
            battle.send(REFUSE, Refuse{{battle.id}, 1, status});
            battle.expect_endpoint_error("refusal");
        }
    });
}

TEST_P(HostilePeer, PutsThatItNeverServesEndWithAnError)
{
    run_battle([](Battle &battle) {
        Buffer source(100000, Data::BF16, 1);
        for (unsigned how = 0; how < 4; ++how) {
            Memory target(battle.friend_of_victim, 100000);
            uct_rkey_bundle_t rkey;
            ASSERT_EQ(UCS_OK, uct_rkey_unpack(battle.victim.component, &target.key, &rkey));
            uct_iov_t iov = {source.data(), source.length(), nullptr, 0, 1};
            static unsigned puts, flushes;
            puts = flushes = 0;
            uct_completion_t put = {[](uct_completion_t *) { ++puts; }, 1, UCS_OK};
            uct_completion_t flush = {[](uct_completion_t *) { ++flushes; }, 1, UCS_OK};
            EXPECT_EQ(UCS_INPROGRESS,
                      uct_ep_put_zcopy(battle.ep, &iov, 1, target.address(), rkey.rkey, &put));
            EXPECT_EQ(UCS_INPROGRESS, uct_ep_flush(battle.ep, 0, &flush));
            std::string message;
            EXPECT_TRUE(battle.receive(REQUEST, message));
            switch (how) {
            case 0:
                battle.send(BYE, Header{battle.id});
                break;
            case 1:
                battle.send(REFUSE, Refuse{{battle.id}, 1, UCS_ERR_INVALID_ADDR});
                break;
            case 2:
                battle.send(ACK, Ack{{battle.id}, 77, 0});
                break;
            default:
                battle.send(GRANT, Header{battle.id});
            }
            battle.progress_until([] { return puts > 0 && flushes > 0; });
            EXPECT_EQ(1u, puts);
            EXPECT_EQ(1u, flushes);
            EXPECT_TRUE(UCS_STATUS_IS_ERR(put.status));
            EXPECT_TRUE(UCS_STATUS_IS_ERR(flush.status));
            battle.expect_endpoint_error("a put that is not served");
            uct_rkey_release(battle.victim.component, &rkey);
        }
    });
}

TEST_P(HostilePeer, WhoTakesSlotsAndLeavesStarvesNobody)
{
    run_battle(
            [](Battle &battle) {
                for (unsigned i = 0; i < 20; ++i) {
                    Grant grant;
                    EXPECT_FALSE(battle.get_slots(4, grant).empty());
                    battle.send(BYE, Header{battle.id});
                    battle.new_endpoint();
                }
                // one that waits and says goodbye, or breaks the rules while it waits
                for (unsigned i = 0; i < 20; ++i) {
                    Request request{};
                    request.header.to = battle.id;
                    request.wanted = 64;
                    for (unsigned j = 0; j < 10; ++j) {
                        battle.send(REQUEST, request);
                    }
                    if (i % 2 == 1) {
                        battle.send(RETURN, Ack{{battle.id}, 0, 1}, std::string(4, 1));
                    }
                    battle.send(BYE, Header{battle.id});
                    battle.pair.check([&] { battle.progress(); });
                    battle.new_endpoint();
                }
            },
            {{"UCX_ZIP_HOST_STAGING_SIZE", "168k"}});
}

// Nothing asserted but that the victim lives, and serves others.
TEST_P(HostilePeer, NoiseDoesNoHarm)
{
    run_battle([](Battle &battle) {
        std::mt19937_64 random(3);
        Memory memory(battle.victim, 5000);
        // connections that sleep take longer
        const unsigned count = battle.to_endpoints() ? 300 : 1500;
        for (unsigned i = 0; i < count; ++i) {
            const auto type = static_cast<uint8_t>(random() % MESSAGE_TYPE_LAST);
            if (type == GRANT) {
                continue; // the victim would put, and this process's own transport would write
            }
            std::string message(8 + random() % 120, 0);
            for (char &c : message) {
                c = static_cast<char>(random() % 3 == 0 ? random() : random() % 4);
            }
            memcpy(message.data(), &battle.id, sizeof(battle.id));
            if (type == SEGMENT && message.size() > sizeof(Segment) && random() % 2 == 0) {
                Segment segment = segment_for(battle, memory, message.size() - sizeof(Segment));
                segment.address += random() % 6000;
                memcpy(message.data(), &segment, sizeof(segment));
            }
            battle.send(type, message.data(), message.size());
            if (!battle.victim.errors[battle.ep].empty() || i % 50 == 0) {
                battle.send(BYE, Header{battle.id});
                battle.new_endpoint();
            }
        }
        Buffer guards(0);
        EXPECT_EQ(0, memcmp(guards.data() + 0, memory.buffer.data() + 5000, 64));
    });
}

TEST_P(Addresses, OtherVersionsAreUnreachable)
{
    run_battle([](Battle &battle) {
        const auto reachable = [&](const std::string &address) {
            return uct_iface_is_reachable(
                    battle.victim.iface,
                    reinterpret_cast<const uct_device_addr_t *>(
                            battle.friend_of_victim.device_address.data()),
                    reinterpret_cast<const uct_iface_addr_t *>(address.data()));
        };
        const std::string good = battle.friend_of_victim.address;
        EXPECT_TRUE(reachable(good));
        for (size_t i = 0; i < sizeof(IfaceAddress); ++i) {
            std::string other = good;
            other[i] ^= 1;
            EXPECT_FALSE(reachable(other)) << "byte " << i;
        }

        Memory memory(battle.victim, 100);
        uct_rkey_bundle_t rkey;
        for (size_t i = 0; i < sizeof(Version); ++i) {
            PackedRkey other = memory.key;
            reinterpret_cast<char *>(&other)[i] ^= 1;
            EXPECT_EQ(UCS_ERR_UNREACHABLE, uct_rkey_unpack(battle.victim.component, &other, &rkey));
        }

        std::string address(battle.victim.attr.ep_addr_len, 0);
        uct_ep_h ep = HonestPair::create(battle.victim);
        for (size_t i = 0; i <= offsetof(EpAddress, lower_length); ++i) {
            ASSERT_EQ(UCS_OK, uct_ep_get_address(battle.ep, reinterpret_cast<uct_ep_addr_t *>(
                                                                    address.data())));
            address[i] ^= 1;
            EXPECT_TRUE(UCS_STATUS_IS_ERR(
                    uct_ep_connect_to_ep(ep,
                                         reinterpret_cast<const uct_device_addr_t *>(
                                                 battle.victim.device_address.data()),
                                         reinterpret_cast<const uct_ep_addr_t *>(address.data()))))
                    << "byte " << i;
        }
        uct_ep_destroy(ep);
    });
}

// A key is as long as the domain below makes it, whatever it says of itself.
TEST_P(Addresses, KeysThatSayTheyAreLongerAreNotReadBeyondTheirEnd)
{
    run_battle([](Battle &battle) {
        Memory memory(battle.victim, 1000);
        for (unsigned length : {1u, 7u, 200u, 255u}) {
            std::vector<char> exact(sizeof(Rkey)); // so that a sanitizer sees the byte behind it
            Rkey head = memory.key;
            head.lower_length = static_cast<uint8_t>(length);
            memcpy(exact.data(), &head, sizeof(head));
            uct_rkey_bundle_t rkey;
            ASSERT_EQ(UCS_OK, uct_rkey_unpack(battle.victim.component, exact.data(), &rkey));
            EXPECT_EQ(UCS_OK, uct_rkey_release(battle.victim.component, &rkey));
        }
    });
}

TEST_P(Addresses, RegionsHaveUnguessableNames)
{
    run_battle([](Battle &battle) {
        std::vector<std::unique_ptr<Memory>> all;
        uint64_t ones = 0, zeros = 0;
        for (unsigned i = 0; i < 64; ++i) {
            all.push_back(std::make_unique<Memory>(battle.victim, 100));
            ones |= all.back()->key.region;
            zeros |= ~all.back()->key.region;
            for (unsigned j = 0; j < i; ++j) {
                EXPECT_NE(all[i]->key.region, all[j]->key.region);
            }
        }
        EXPECT_EQ(~0ull, ones & zeros) << "bits that never change";
    });
}

// A card refuses to write where the enemy has no memory, or not with that key, and breaks the
// connection; tcp writes, because its peers are trusted.
class HostileGrants : public HostilePeer {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(HostileGrants);

TEST_P(HostileGrants, OfMemoryThatIsNotThereEndThePutWithAnError)
{
    run_battle([](Battle &battle) {
        constexpr uint32_t SLOT = 20480;
        LowerMemory memory(battle.enemy, 4 * SLOT);
        Buffer source(SLOT, Data::BF16, 1);
        const auto attack = [&](const char *what,
                                const std::function<void(Grant &, std::string &)> &change) {
            Memory target(battle.friend_of_victim, SLOT);
            uct_rkey_bundle_t rkey;
            ASSERT_EQ(UCS_OK, uct_rkey_unpack(battle.victim.component, &target.key, &rkey));
            uct_iov_t iov = {source.data(), source.length(), nullptr, 0, 1};
            static unsigned puts, flushes;
            puts = flushes = 0;
            uct_completion_t put = {[](uct_completion_t *) { ++puts; }, 1, UCS_OK};
            uct_completion_t flush = {[](uct_completion_t *) { ++flushes; }, 1, UCS_OK};
            EXPECT_EQ(UCS_INPROGRESS,
                      uct_ep_put_zcopy(battle.ep, &iov, 1, target.address(), rkey.rkey, &put));
            EXPECT_EQ(UCS_INPROGRESS, uct_ep_flush(battle.ep, 0, &flush));
            std::string message;
            EXPECT_TRUE(battle.receive(REQUEST, message));
            Grant grant{};
            grant.header.to = battle.id;
            grant.ring_address = reinterpret_cast<uint64_t>(memory.buffer.data());
            grant.slot_size = SLOT;
            grant.slot_count = 4;
            grant.count = 1;
            std::string key = memory.key;
            change(grant, key);
            grant.rkey_length = static_cast<uint32_t>(key.size());
            const std::string slot(sizeof(uint32_t), 0);
            battle.send(GRANT, grant, slot + key);
            battle.progress_until([] { return puts > 0 && flushes > 0; });
            EXPECT_EQ(1u, puts) << what;
            EXPECT_EQ(1u, flushes) << what;
            EXPECT_TRUE(UCS_STATUS_IS_ERR(flush.status)) << what;
            battle.expect_endpoint_error(what);
            uct_rkey_release(battle.victim.component, &rkey);
        };
        attack("address 0", [](Grant &g, std::string &) { g.ring_address = 0; });
        attack("before the memory", [](Grant &g, std::string &) { --g.ring_address; });
        attack("behind the memory", [](Grant &g, std::string &) { g.ring_address += 4 * SLOT; });
        attack("a key of nothing", [](Grant &, std::string &key) {
            for (char &c : key) {
                c = static_cast<char>(c ^ 0x55);
            }
        });
        attack("key 0", [](Grant &, std::string &key) { key.assign(key.size(), 0); });
    });
}

INSTANTIATE_TEST_SUITE_P(Over, HostileGrants, testing::ValuesIn(rc_wires()),
                         [](const auto &wire) { return wire.param.name; });
INSTANTIATE_TEST_SUITE_P(Over, HostilePeer, testing::ValuesIn(networks()),
                         [](const auto &wire) { return wire.param.name; });
INSTANTIATE_TEST_SUITE_P(Over, Addresses, testing::ValuesIn(networks()),
                         [](const auto &wire) { return wire.param.name; });

} // namespace
} // namespace zip::test
