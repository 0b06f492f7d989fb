// simulation/world.cpp -- the module _simulated_world: a c10d store and a c10d backend for ranks that are threads of one
// process. They behave as TCPStore and as gloo do (conformance.py says in which facts); the backend's name is "gloo".
// test_conformance_simulated.py compares them.
//
// A Universe is all that the ranks of a run share. Its lock is a std::mutex and each wait one of a std::condition_variable, so
// seams.c decides who goes on, and when; this file knows nothing of threads. A collective is done by the rank that comes to it
// last, on the tensors of all ranks, in the order of ranks. Each rank sees that it has ended a random time later.
//
// Tensors are written as gloo writes them: through their address, without a new version.
#include <pybind11/chrono.h>
#include <torch/extension.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/exception.h>

#include "seams.h"

namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;
using Bytes = std::vector<uint8_t>;
using Tensors = std::vector<at::Tensor>;
using c10d::OpType;

class Work;

// What one rank brings to a collective.
struct Part {
    Tensors inputs, outputs; // see do_collective() for the order
    c10::intrusive_ptr<Work> work;
};

// Ranks meet in a collective if these are equal: the number of their calls, the type, the root.
using Key = std::tuple<uint64_t, OpType, int>;

struct Collective {
    c10d::ReduceOp::RedOpType reduction = c10d::ReduceOp::SUM;
    std::map<int, Part> parts; // by the rank in the group
};

struct Message {
    at::Tensor tensor; // to be sent, or written
    c10::intrusive_ptr<Work> work;
};

using Channel = std::tuple<int, int, int>; // source, or -1 for any; destination, tag

struct Group {
    std::condition_variable changed; // with the lock of the universe
    int size = 0;
    bool is_given_up = false;          // a rank did not wait until all had come
    std::map<int, int> world_ranks;    // of the members that have come, by the rank in the group
    std::vector<uint64_t> counts;      // collectives that each rank has begun
    std::map<Key, Collective> pending; // that a rank has begun, and not all have come to
    std::map<Channel, std::deque<Message>> sends, receives;
    std::map<uint64_t, c10::intrusive_ptr<Work>> works;          // that have not ended, in the order of their begin
    uint64_t begun = 0;                                          // works
    Clock::time_point first_deadline = Clock::time_point::max(); // of pending works, or an earlier time
    std::set<int> closed;                                        // ranks whose connections are closed
};

// What happens to a rank at a point, see seams.h.
enum Kind { KILL, FREEZE, INTERRUPT_WAIT, INTERRUPT, STARVE };

struct Fault {
    int kind, rank;
    int64_t point;       // of its rank; it strikes there, or at the next one where it can
    int64_t nanoseconds; // of FREEZE
    int64_t struck = -1; // virtual time
};

struct Universe {
    std::mutex lock;
    std::condition_variable changed;
    std::map<std::string, Bytes> values; // of the store
    std::map<std::string, std::deque<Bytes>> queues;
    int64_t calls = 0; // to the store
    int64_t bytes = 0; // that went to the store and came from it
    bool store_is_gone = false;
    std::map<std::string, std::shared_ptr<Group>> groups;
    int64_t longest = 0; // nanoseconds until a rank sees that a collective has ended
    int host = -1;       // the rank whose process has the store; -1: none
    std::vector<Fault> faults;
};

std::shared_ptr<Universe> universe;

// The GIL must not be held by a thread that hands over at its own wish: the others would only wait for it.
void
pause()
{
    if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) {
        fp_sim_pause();
    }
}

// Keys of all ranks are alike, though names of groups are unique: see NAMES in ranks.py.
std::string
common(const std::string &key)
{
    std::string found;
    for (size_t i = 0; i < key.size(); i++) {
        if (key[i] == '\x01') {
            while (key[++i] != '\x01') {
            }
            continue;
        }
        found += key[i];
    }
    return found;
}

Bytes
as_bytes(const std::string &text)
{
    return {text.begin(), text.end()};
}

// One connection to the store. It is locked while a call is made on it, waits included.
class Store : public c10d::Store {
  public:
    explicit Store(std::shared_ptr<Universe> all, Milliseconds timeout) : c10d::Store(timeout), all_(std::move(all)) {}

    c10::intrusive_ptr<c10d::Store> clone() override
    {
        pause();
        std::unique_lock held(all_->lock);
        all_->calls++;
        if (all_->store_is_gone) {
            all_->changed.wait_for(held, timeout_, [] { return false; });
            C10_THROW_ERROR(DistNetworkError, "The client socket has timed out after " +
                                                  std::to_string(timeout_.count()) +
                                                  "ms while trying to connect to (127.0.0.1, 20000).");
        }
        return c10::make_intrusive<Store>(all_, timeout_);
    }

    using c10d::Store::compareSet;
    using c10d::Store::set;

    void set(const std::string &key, const Bytes &value) override
    {
        if (const auto held = ask(false, value.size())) {
            all_->values[common(key)] = value;
            all_->changed.notify_all();
        }
    }

    Bytes compareSet(const std::string &key, const Bytes &expected, const Bytes &wanted) override
    {
        const auto held = ask(true, wanted.size());
        const auto found = all_->values.find(common(key));
        if (found == all_->values.end() ? !expected.empty() : found->second != expected) {
            return found == all_->values.end() ? expected : found->second;
        }
        all_->values[common(key)] = wanted;
        all_->changed.notify_all();
        return wanted;
    }

    Bytes get(const std::string &key) override
    {
        return multiGet({key}).front();
    }

    int64_t add(const std::string &key, int64_t value) override
    {
        const auto held = ask(true, 8);
        Bytes &found = all_->values[common(key)];
        try {
            value += found.empty() ? 0 : std::stoll(std::string(found.begin(), found.end()));
        }
        catch (const std::exception &) { /* the server ends this connection */
            is_broken_ = true;
            throw_closed();
        }
        found = as_bytes(std::to_string(value));
        all_->changed.notify_all();
        return value;
    }

    bool deleteKey(const std::string &key) override
    {
        const auto held = ask(true);
        return all_->values.erase(common(key)) != 0;
    }

    bool check(const std::vector<std::string> &keys) override
    {
        const auto held = ask(true);
        return std::all_of(keys.begin(), keys.end(),
                           [this](const auto &key) { return all_->values.count(common(key)) != 0; });
    }

    int64_t getNumKeys() override
    {
        const auto held = ask(true);
        return static_cast<int64_t>(all_->values.size());
    }

    void wait(const std::vector<std::string> &keys) override
    {
        wait(keys, timeout_);
    }

    void wait(const std::vector<std::string> &keys, const Milliseconds &timeout) override
    {
        auto held = ask(true);
        wait_for_keys(held, keys, timeout);
    }

    void append(const std::string &key, const Bytes &value) override
    {
        if (const auto held = ask(false, value.size())) {
            Bytes &found = all_->values[common(key)];
            found.insert(found.end(), value.begin(), value.end());
            all_->changed.notify_all();
        }
    }

    std::vector<Bytes> multiGet(const std::vector<std::string> &keys) override
    {
        auto held = ask(true);
        wait_for_keys(held, keys, timeout_);
        std::vector<Bytes> found;
        for (const std::string &key : keys) {
            found.push_back(all_->values.at(common(key)));
            all_->bytes += static_cast<int64_t>(found.back().size());
        }
        return found;
    }

    void multiSet(const std::vector<std::string> &keys, const std::vector<Bytes> &values) override
    {
        if (const auto held = ask(false)) {
            for (size_t i = 0; i < keys.size(); i++) {
                all_->values[common(keys[i])] = values[i];
            }
            all_->changed.notify_all();
        }
    }

    void queuePush(const std::string &key, const Bytes &value) override
    {
        const auto held = ask(true, value.size());
        all_->queues[common(key)].push_back(value);
        all_->changed.notify_all();
    }

    Bytes queuePop(const std::string &key, bool waits) override
    {
        auto held = ask(true);
        auto &queue = all_->queues[common(key)];
        if (queue.empty() && !waits) {
            C10_THROW_ERROR(DistQueueEmptyError, "queue is empty");
        }
        wait_until(held, {key}, timeout_, [&queue] { return !queue.empty(); });
        Bytes found = std::move(queue.front());
        queue.pop_front();
        return found;
    }

    int64_t queueLen(const std::string &key) override
    {
        const auto held = ask(true);
        return static_cast<int64_t>(all_->queues[common(key)].size());
    }

    bool hasExtendedApi() const override
    {
        return true;
    }

  private:
    // The locks of a call; none: the server is gone, and the call, to which there is no answer, does not see that.
    struct Call {
        std::unique_lock<std::mutex> connection, universe;
        explicit operator bool() const
        {
            return universe.owns_lock();
        }
    };

    Call ask(bool is_answered, size_t bytes = 0)
    {
        pause();
        Call call{std::unique_lock(connection_), std::unique_lock(all_->lock)};
        all_->calls++;
        all_->bytes += static_cast<int64_t>(bytes);
        if (is_broken_) {
            throw_closed();
        }
        if (all_->store_is_gone) {
            if (saw_the_end_) {
                C10_THROW_ERROR(DistNetworkError, "failed to send, Broken pipe");
            }
            saw_the_end_ = true;
            if (is_answered) {
                throw_closed();
            }
            call.universe.unlock();
        }
        return call;
    }

    [[noreturn]] static void throw_closed()
    {
        C10_THROW_ERROR(DistNetworkError, "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote "
                                          "server shutdown or crash?");
    }

    template <typename Condition>
    void wait_until(Call &call, const std::vector<std::string> &keys, Milliseconds timeout, Condition holds)
    {
        const auto ends = [&] { return all_->store_is_gone || holds(); };
        if (timeout == kNoTimeout) {
            all_->changed.wait(call.universe, ends);
        }
        else if (!all_->changed.wait_for(call.universe, timeout, ends)) {
            std::string names;
            for (const std::string &key : keys) {
                names += (names.empty() ? "/" : ", /") + common(key);
            }
            C10_THROW_ERROR(DistStoreError,
                            "wait timeout after " + std::to_string(timeout.count()) + "ms, keys: " + names);
        }
        if (all_->store_is_gone) {
            saw_the_end_ = true;
            throw_closed();
        }
    }

    void wait_for_keys(Call &call, const std::vector<std::string> &keys, Milliseconds timeout)
    {
        size_t n = 0; /* of the keys that are there: many ranks wait for many keys */
        wait_until(call, keys, timeout, [&] {
            while (n < keys.size() && all_->values.count(common(keys[n])) != 0) {
                n++;
            }
            return n == keys.size();
        });
    }

    const std::shared_ptr<Universe> all_;
    std::mutex connection_; // taken before the universe's
    bool is_broken_ = false, saw_the_end_ = false;
};

// A collective, or a message, of one rank. The lock of the universe protects all of it.
//
// What sends, receives, or reduces and scatters says nothing of its end before wait(), and its time runs from there (of a
// message) or wait() ignores its argument (of a reduce-scatter): torch gives these other classes than the rest.
class Work : public c10d::Work {
  public:
    Work(std::shared_ptr<Universe> all, std::shared_ptr<Group> group, int rank, Key key, OpType type, Tensors outputs,
         Milliseconds timeout, int peer)
        : c10d::Work(rank, type), timeout(timeout), rank(rank), peer(peer), type(type), key(std::move(key)),
          all_(std::move(all)), group_(std::move(group)), outputs_(std::move(outputs)), serial_(group_->begun++),
          future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get())))
    {
        if (!is_message()) {
            set_deadline(timeout);
        }
    }

    bool isCompleted() override
    {
        pause();
        const std::lock_guard held(all_->lock);
        bring_up_to_date();
        return says_nothing() ? is_message() && was_awaited_ : has_ended_;
    }

    bool isSuccess() const override
    {
        const std::lock_guard held(all_->lock);
        return type == OpType::REDUCE_SCATTER || !error_;
    }

    std::exception_ptr exception() const override
    {
        const std::lock_guard held(all_->lock);
        return error_;
    }

    bool wait(Milliseconds patience) override
    {
        pause();
        {
            std::unique_lock held(all_->lock);
            if (is_message() && is_pending()) {
                set_deadline(patience == kNoTimeout ? timeout : patience);
            }
            const bool waits_on = says_nothing() || patience == kNoTimeout;
            const Clock::time_point last = waits_on ? Clock::time_point::max() : Clock::now() + patience;
            for (bring_up_to_date(); !has_ended_; bring_up_to_date()) {
                if (Clock::now() >= last) {
                    throw std::runtime_error("Operation timed out!"); /* torch's Work::wait() */
                }
                group_->changed.wait_until(held, std::min(last, ends_at_.value_or(group_->first_deadline)));
            }
            was_awaited_ = !error_;
        }
        if (error_) {
            std::rethrow_exception(error_);
        }
        if (at_wait) {
            at_wait();
        }
        return true;
    }

    void synchronize() override {}

    int sourceRank() const override
    {
        return source;
    }

    Tensors result() override
    {
        return says_nothing() ? c10d::Work::result() : outputs_;
    }

    uint64_t getSequencenumber() const override
    {
        return std::get<0>(key);
    }

    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override
    {
        return says_nothing() ? c10d::Work::getFuture() : future_;
    }

    // It has ended well; this rank sees that in a while, the later the more bytes there are.
    void end_soon()
    {
        int64_t bytes = 0;
        for (const at::Tensor &output : outputs_) {
            bytes += static_cast<int64_t>(output.nbytes());
        }
        ends_at_ = Clock::now() + std::chrono::nanoseconds(bytes / 8 + static_cast<int64_t>(fp_sim_random(
                                                                           static_cast<uint64_t>(all_->longest) + 1)));
    }

    // It has ended well, whatever becomes of the other ranks.
    void end_now()
    {
        ends_at_ = Clock::now();
    }

    void fail(const std::exception_ptr &error)
    {
        if (!ends_at_ && !has_ended_) {
            error_ = error;
            end();
        }
    }

    void fail(const std::string &why)
    {
        fail(std::make_exception_ptr(std::runtime_error(why)));
    }

    // Whether it and another are of one collective, which has not ended for either.
    bool is_of_the_collective_of(const Work &other) const
    {
        return key == other.key && peer < 0 && other.peer < 0 && !has_ended_ && !other.has_ended_;
    }

    // It would have ended well, but a rank has ended before.
    void tear(const std::string &why)
    {
        if (!has_ended_ && ends_at_ > Clock::now()) {
            ends_at_.reset();
            fail(why);
        }
    }

    bool is_pending() const
    {
        return !ends_at_ && !has_ended_;
    }

    bool is_message() const
    {
        return type == OpType::SEND || type == OpType::RECV;
    }

    bool is_rooted() const
    {
        return type == OpType::BROADCAST || type == OpType::GATHER || type == OpType::SCATTER;
    }

    int root() const
    {
        return std::get<2>(key);
    }

    bool needs(int other) const;
    const char *operation() const;

    const Milliseconds timeout;
    const int rank; // in the group
    const int peer; // of a message; -1: it is none, or from any rank
    const OpType type;
    const Key key;
    Clock::time_point deadline = Clock::time_point::max();
    int source = -1;               // of a message that has come
    std::function<void()> at_wait; // writes the output

  private:
    bool says_nothing() const
    {
        return is_message() || type == OpType::REDUCE_SCATTER;
    }

    void set_deadline(Milliseconds patience)
    {
        patience_ = patience;
        deadline = Clock::now() + patience;
        group_->first_deadline = std::min(group_->first_deadline, deadline);
    }

    void end()
    {
        has_ended_ = true;
        if (error_) {
            future_->setError(error_);
        }
        else {
            future_->markCompleted(c10::IValue(outputs_));
        }
    }

    void bring_up_to_date();

    const std::shared_ptr<Universe> all_;
    const std::shared_ptr<Group> group_;
    const Tensors outputs_;
    const uint64_t serial_;
    const c10::intrusive_ptr<c10::ivalue::Future> future_;
    Milliseconds patience_{};
    std::optional<Clock::time_point> ends_at_; // set once all ranks have come
    bool has_ended_ = false, was_awaited_ = false;
    std::exception_ptr error_;

    friend void expire(Group &);
    friend class Backend;
};

const std::string CLOSED =
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:";

// Why a rank fails that has lost a member, perhaps itself.
std::string
loss(int member, int rank)
{
    return member == rank ? "Application timeout caused pair closure" : CLOSED + std::to_string(20000 + member);
}

// The bytes of a segment of an all-reduce in a ring: gloo cuts the tensor into two segments a rank, or fewer if it is small.
size_t
segment(size_t bytes, size_t element, int size)
{
    const size_t segments = 2 * static_cast<size_t>(size);
    const size_t each = (bytes + segments - 1) / segments;
    return (each + element - 1) / element * element;
}

// Whether this work fails if the connections of another member are closed, or waits on until its time is over.
bool
Work::needs(int other) const
{
    const int size = group_->size;
    const int right = (rank + 1) % size, left = (rank + size - 1) % size;
    if (other == rank) {
        return true;
    }
    if (is_message()) {
        return peer < 0 || peer == other;
    }
    if (is_rooted()) {
        return rank == root() || other == root();
    }
    if (type == OpType::ALLREDUCE || type == OpType::REDUCE || type == OpType::REDUCE_SCATTER) {
        const at::Tensor &tensor = outputs_.front();
        const size_t first = 2 * static_cast<size_t>(right) * segment(tensor.nbytes(), tensor.element_size(), size);
        return other == right ||
               (other == left && first < tensor.nbytes()); /* from the right; to the left, if anything */
    }
    return type != OpType::ALLGATHER || other == left || other == right; /* a ring */
}

// What a work waits for while another rank has not come.
const char *
Work::operation() const
{
    const int size = group_->size, right = (rank + 1) % size, left = (rank + size - 1) % size;
    const auto found = group_->pending.find(key);
    const auto has_come = [&](int other) {
        return found != group_->pending.end() && found->second.parts.count(other) != 0;
    };
    bool sends = false;
    switch (type) {
        case OpType::SEND:
        case OpType::SCATTER:
        case OpType::BROADCAST:
            sends = type == OpType::SEND || rank == root();
            break;
        case OpType::ALLTOALL:
            sends = true;
            break;
        case OpType::ALLGATHER:
            sends = !has_come(right);
            break;
        case OpType::BARRIER:
            sends = has_come(left);
            break;
        case OpType::ALLREDUCE:
        case OpType::REDUCE:
        case OpType::REDUCE_SCATTER:
            sends = has_come(right) && !has_come(left);
            break;
        default:
            break;
    }
    return sends ? "send" : "recv";
}

// Close the connections of a member: what needs it fails, now and later. If it was in the midst of a collective, some ranks
// may have got from it all that they need, and others not.
void
close(Group &group, int member)
{
    if (!group.closed.insert(member).second) {
        return;
    }
    const auto works = group.works;
    for (const auto &[number, mine] : works) {
        for (const auto &[other, work] : works) {
            if (mine->rank == member && work->is_of_the_collective_of(*mine) && fp_sim_random(2) == 0) {
                work->tear(loss(member, work->rank));
            }
        }
    }
    for (const auto &[number, work] : works) {
        if (work->needs(member)) {
            work->fail(loss(member, work->rank));
        }
    }
    group.changed.notify_all();
}

// Fail the works whose time is over; the rank of such a work closes its connections. Others, whose time is over at
// about the same time, fail in the same way: ranks that wait for the same one give up together.
void
expire(Group &group)
{
    const Clock::time_point now = Clock::now();
    if (now < group.first_deadline) {
        return;
    }
    std::set<int> over;
    for (const auto &[number, work] : std::map(group.works)) {
        if (work->is_pending() && work->deadline <= now + std::chrono::nanoseconds(10 * work->all_->longest) &&
            over.insert(work->rank).second) {
            work->fail("[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting " +
                       std::to_string(work->patience_.count()) + "ms for " + work->operation() +
                       " operation to complete");
        }
    }
    for (const int rank : over) {
        close(group, rank);
    }
    group.first_deadline = Clock::time_point::max();
    for (const auto &[number, work] : group.works) {
        if (work->is_pending()) {
            group.first_deadline = std::min(group.first_deadline, work->deadline);
        }
    }
}

void
Work::bring_up_to_date()
{
    expire(*group_);
    if (ends_at_ && *ends_at_ <= Clock::now() && !has_ended_) {
        end();
    }
    if (has_ended_) {
        group_->works.erase(serial_);
    }
}

// The same memory without autograd and strides: writing to it makes no new version.
at::Tensor
plain(const at::Tensor &tensor)
{
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.options().requires_grad(false));
}

at::Tensor
copy_of(const at::Tensor &tensor)
{
    const at::AutoDispatchBelowADInplaceOrView below;
    return tensor.contiguous().clone();
}

// Copy bytes: the dtypes may differ. from has no strides.
void
write_into(const at::Tensor &to, const at::Tensor &from)
{
    const size_t bytes = std::min(to.nbytes(), from.nbytes());
    if (bytes == 0) {
        return;
    }
    if (to.is_contiguous()) {
        std::memcpy(to.data_ptr(), from.data_ptr(), bytes);
        return;
    }
    const at::Tensor packed = copy_of(to);
    std::memcpy(packed.data_ptr(), from.data_ptr(), bytes);
    at::from_blob(to.data_ptr(), to.sizes(), to.strides(), to.options().requires_grad(false)).copy_(packed);
}

at::Tensor
reduced(const Tensors &inputs, c10d::ReduceOp::RedOpType reduction)
{
    at::Tensor sum = inputs.front().numel() == 0 ? inputs.front().clone() : plain(inputs.front()).clone();
    for (size_t i = 1; i < inputs.size() && sum.numel() != 0; i++) {
        const at::Tensor next = plain(inputs[i]).view_as(sum);
        switch (reduction) {
            case c10d::ReduceOp::SUM:
            case c10d::ReduceOp::AVG:
                sum.add_(next);
                break;
            case c10d::ReduceOp::PRODUCT:
                sum.mul_(next);
                break;
            case c10d::ReduceOp::MIN:
                sum = at::minimum(sum, next);
                break;
            case c10d::ReduceOp::MAX:
                sum = at::maximum(sum, next);
                break;
            case c10d::ReduceOp::BAND:
                sum.bitwise_and_(next);
                break;
            case c10d::ReduceOp::BOR:
                sum.bitwise_or_(next);
                break;
            default:
                throw std::runtime_error("Unhandled ReduceOp");
        }
    }
    if (reduction == c10d::ReduceOp::AVG) {
        sum.div_(static_cast<int64_t>(inputs.size()));
    }
    return sum;
}

// All inputs i of the ranks, in their order.
Tensors
inputs_of(const Collective &collective, size_t i)
{
    Tensors found;
    for (const auto &[rank, part] : collective.parts) {
        found.push_back(part.inputs[i]);
    }
    return found;
}

// Give a rank what a collective with a root has for it, or the root what the rank has.
void
serve(OpType type, const Part &root, const Part &part, int rank)
{
    const at::AutoDispatchBelowADInplaceOrView below;
    if (type == OpType::BROADCAST) {
        for (size_t i = 0; i < part.outputs.size(); i++) {
            write_into(plain(part.outputs[i]), plain(root.inputs[i]));
        }
    }
    else if (type == OpType::SCATTER) {
        write_into(part.outputs[0], plain(root.inputs[static_cast<size_t>(rank)]));
    }
    else {
        write_into(root.outputs[static_cast<size_t>(rank)], plain(part.inputs[0]));
    }
}

// Do what all ranks have come to. Inputs and outputs of a rank:
//   all-reduce, reduce        tensors; the same ones
//   broadcast                 tensors; the same ones
//   all-gather                tensors; for each of them one output a rank, in turn
//   gather                    a tensor; on the root one output a rank
//   scatter                   on the root one input a rank; a tensor
//   all-to-all                one input a rank; one output a rank
void
do_collective(OpType type, int root, Collective &collective)
{
    const at::AutoDispatchBelowADInplaceOrView below;
    auto &parts = collective.parts;
    const Part &first = parts.begin()->second;
    for (size_t i = 0; i < first.inputs.size() && (type == OpType::ALLREDUCE || type == OpType::REDUCE); i++) {
        const at::Tensor sum = reduced(inputs_of(collective, i), collective.reduction);
        for (auto &[rank, part] : parts) {
            if (type == OpType::ALLREDUCE || rank == root) {
                write_into(plain(part.outputs[i]), sum);
            }
        }
    }
    if (type != OpType::ALLGATHER && type != OpType::ALLTOALL) {
        return;
    }
    std::map<int, Tensors> sent; /* outputs may overlap inputs */
    for (auto &[rank, part] : parts) {
        for (const at::Tensor &input : part.inputs) {
            sent[rank].push_back(copy_of(input));
        }
    }
    for (auto &[rank, part] : parts) {
        for (size_t i = 0; i < part.outputs.size(); i++) {
            const Tensors &of_rank = sent[static_cast<int>(i % parts.size())];
            write_into(part.outputs[i],
                       of_rank[type == OpType::ALLGATHER ? i / parts.size() : static_cast<size_t>(rank)]);
        }
    }
}

// The ranks whose processes die, since they get more bytes than they have room for.
std::set<int>
overrun(OpType type, int root, const Collective &collective, int size)
{
    std::set<int> found;
    const auto &parts = collective.parts;
    const auto gets = [&](int to, size_t output, int from, size_t input) {
        const auto &here = parts.find(to), &there = parts.find(from);
        if (here != parts.end() && there != parts.end() && output < here->second.outputs.size() &&
            input < there->second.inputs.size() &&
            there->second.inputs[input].nbytes() > here->second.outputs[output].nbytes()) {
            found.insert(to);
        }
    };
    const auto segment_of = [&](const Part &part) {
        const at::Tensor &tensor = part.inputs.front();
        return segment(tensor.nbytes(), tensor.element_size(), size);
    };
    for (const auto &[rank, part] : parts) {
        for (const auto &[other, of_other] : parts) {
            const size_t to = static_cast<size_t>(rank), from = static_cast<size_t>(other);
            if (type == OpType::ALLGATHER) {
                gets(rank, from, other, 0);
            }
            else if (type == OpType::ALLTOALL) {
                gets(rank, from, other, to);
            }
            else if (type == OpType::BROADCAST && other == root) {
                gets(rank, 0, other, 0);
            }
            else if (type == OpType::SCATTER && other == root) {
                gets(rank, 0, other, to);
            }
            else if (type == OpType::GATHER && rank == root) {
                gets(rank, from, other, 0);
            }
            else if ((type == OpType::ALLREDUCE || type == OpType::REDUCE) && segment_of(part) < segment_of(of_other)) {
                found.insert(rank);
            }
        }
    }
    return found;
}

void end_process(int rank);

class Backend : public c10d::Backend {
  public:
    Backend(const c10::intrusive_ptr<c10d::Store> &store, int rank, int size, Milliseconds timeout)
        : c10d::Backend(rank, size), all_(universe), store_(store),
          options_(c10::make_intrusive<Options>("gloo", timeout))
    {
        store->set(std::to_string(rank), std::string("comes")); /* nobody sees by this call that the store is gone */
        const std::string number = std::to_string(store->add("rank " + std::to_string(rank), 1));
        const std::string made = std::to_string(fp_sim_random(1ULL << 40)) + "." + std::to_string(fp_sim_now());
        const std::string id = store->compareSet("group " + number, "", made);
        const auto place = [&](int member) { return number + "/" + std::to_string(member); };
        {
            const std::lock_guard held(all_->lock);
            auto &group = all_->groups[id];
            if (!group) {
                group = std::make_shared<Group>();
                group->size = size;
                group->counts.resize(static_cast<size_t>(size));
            }
            group_ = group;
            group_->world_ranks[rank] = fp_sim_rank();
            group_->changed.notify_all();
        }
        store->set(place(rank), std::string("has come"));
        for (int member = size - 1; member >= 0; member--) {
            if (!has_come(member)) {
                try {
                    store->wait({place(member)}, timeout);
                }
                catch (const c10::Error &) {
                    const std::lock_guard held(all_->lock);
                    group_->is_given_up = true;
                    throw;
                }
            }
        }
        const std::lock_guard held(all_->lock);
        if (group_->is_given_up) {
            throw std::runtime_error("Gloo connectFullMesh failed with connect, Connection refused");
        }
    }

    ~Backend() override
    {
        const std::lock_guard held(all_->lock);
        if (group_) {
            close(*group_, rank_);
        }
    }

    const std::string getBackendName() const override
    {
        return "gloo";
    }

    c10::intrusive_ptr<Options> getBackendOptions() override
    {
        return options_;
    }

    void setTimeout(Milliseconds timeout) override
    {
        options_->timeout = timeout;
    }

    void setSequenceNumberForGroup() override {}

    uint64_t getSequenceNumberForGroup() override
    {
        return group_->counts[static_cast<size_t>(rank_)];
    }

    void shutdown() override {} /* gloo closes connections when the last reference goes */

    void abort() override {}

    c10::intrusive_ptr<c10d::Work> broadcast(Tensors &tensors, const c10d::BroadcastOptions &options) override
    {
        TORCH_CHECK(options.rootRank >= 0 && options.rootRank < size_,
                    "ProcessGroupGloo::broadcast: invalid root rank: ", options.rootRank);
        return begin(OpType::BROADCAST, tensors, tensors, options.timeout, static_cast<int>(options.rootRank));
    }

    c10::intrusive_ptr<c10d::Work> allreduce(Tensors &tensors, const c10d::AllreduceOptions &options) override
    {
        return begin(OpType::ALLREDUCE, tensors, tensors, options.timeout, 0, options.reduceOp);
    }

    c10::intrusive_ptr<c10d::Work> allreduce_coalesced(Tensors &tensors,
                                                       const c10d::AllreduceCoalescedOptions &options) override
    {
        return begin(OpType::ALLREDUCE, tensors, tensors, options.timeout, 0, options.reduceOp);
    }

    c10::intrusive_ptr<c10d::Work> reduce(Tensors &tensors, const c10d::ReduceOptions &options) override
    {
        return begin(OpType::REDUCE, tensors, tensors, options.timeout, static_cast<int>(options.rootRank),
                     options.reduceOp);
    }

    c10::intrusive_ptr<c10d::Work> allgather(std::vector<Tensors> &outputs, Tensors &inputs,
                                             const c10d::AllgatherOptions &options) override
    {
        for (size_t i = 0; i < outputs.size(); i++) {
            const std::string at = " at index " + std::to_string(i);
            const at::Tensor &input = inputs.at(i);
            TORCH_CHECK(static_cast<int>(outputs[i].size()) == size_,
                        "ProcessGroupGloo::allgather: invalid output tensor list", at, " (expected length ", size_,
                        ", got ", outputs[i].size(), ")");
            for (const at::Tensor &output : outputs[i]) {
                TORCH_CHECK(output.dtype() == input.dtype(), "ProcessGroupGloo::allgather: invalid tensor type", at,
                            " (expected ", input.options(), ", got ", output.options(), ")");
                TORCH_CHECK(output.sizes() == input.sizes(), "ProcessGroupGloo::allgather: invalid tensor size", at,
                            " (expected (", c10::Join(", ", input.sizes()), "), got (", c10::Join(", ", output.sizes()),
                            "))");
            }
        }
        return gather_all(inputs, all_of(outputs), options.timeout);
    }

    c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor &output, at::Tensor &input,
                                                   const c10d::AllgatherOptions &options) override
    {
        const at::AutoDispatchBelowADInplaceOrView below;
        std::vector<Tensors> outputs{output.chunk(size_)};
        Tensors inputs{input};
        return allgather(outputs, inputs, options);
    }

    c10::intrusive_ptr<c10d::Work> allgather_coalesced(std::vector<Tensors> &outputs, Tensors &inputs,
                                                       const c10d::AllgatherOptions &options) override
    {
        Tensors turned; /* outputs has a list for each rank */
        for (size_t i = 0; i < inputs.size(); i++) {
            for (const Tensors &of_rank : outputs) {
                turned.push_back(of_rank[i]);
            }
        }
        return gather_all(inputs, turned, options.timeout);
    }

    c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                                                   const c10d::AllgatherOptions &options) override
    {
        Tensors pieces;
        for (size_t i = 0; i < outputs.size(); i++) {
            for (const at::Tensor &piece : cut(outputs[i], inputs[i])) {
                pieces.push_back(piece);
            }
        }
        return gather_all(inputs, pieces, options.timeout);
    }

    c10::intrusive_ptr<c10d::Work> gather(std::vector<Tensors> &outputs, Tensors &inputs,
                                          const c10d::GatherOptions &options) override
    {
        return begin(OpType::GATHER, inputs, all_of(outputs), options.timeout, static_cast<int>(options.rootRank));
    }

    c10::intrusive_ptr<c10d::Work> scatter(Tensors &outputs, std::vector<Tensors> &inputs,
                                           const c10d::ScatterOptions &options) override
    {
        return begin(OpType::SCATTER, all_of(inputs), outputs, options.timeout, static_cast<int>(options.rootRank));
    }

    c10::intrusive_ptr<c10d::Work> reduce_scatter(Tensors &outputs, std::vector<Tensors> &inputs,
                                                  const c10d::ReduceScatterOptions &options) override
    {
        const at::AutoDispatchBelowADInplaceOrView below;
        Tensors wholes;
        for (const Tensors &list : inputs) {
            Tensors flat;
            for (const at::Tensor &input : list) {
                flat.push_back(input.reshape({-1}));
            }
            wholes.push_back(at::cat(flat));
        }
        return scatter_sums(outputs, wholes, options);
    }

    c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                                                        const c10d::ReduceScatterOptions &options) override
    {
        return scatter_sums({output}, {input}, options);
    }

    c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                                                   const c10d::ReduceScatterOptions &options) override
    {
        return scatter_sums(outputs, inputs, options);
    }

    c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor &output, at::Tensor &input, std::vector<int64_t> &outputs,
                                                 std::vector<int64_t> &inputs,
                                                 const c10d::AllToAllOptions &options) override
    {
        return begin(OpType::ALLTOALL, split(input, inputs), split(output, outputs), options.timeout);
    }

    c10::intrusive_ptr<c10d::Work> alltoall(Tensors &outputs, Tensors &inputs,
                                            const c10d::AllToAllOptions &options) override
    {
        return begin(OpType::ALLTOALL, inputs, outputs, options.timeout);
    }

    c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions &options) override
    {
        return begin(OpType::BARRIER, {}, {}, options.timeout);
    }

    void monitoredBarrier(const c10d::BarrierOptions &options, bool) override
    {
        const Milliseconds patience = options.timeout == c10d::kUnsetTimeout ? options_->timeout : options.timeout;
        const int tag = -1 - static_cast<int>(group_->counts[static_cast<size_t>(rank_)]++);
        if (rank_ != 0) {
            const auto sent = exchange(OpType::SEND, 0, at::zeros({1}), tag);
            const auto received = exchange(OpType::RECV, 0, at::zeros({1}), tag);
            sent->wait(patience);
            received->wait(patience);
            return;
        }
        std::vector<c10::intrusive_ptr<c10d::Work>> received, sent;
        for (int other = 1; other < size_; other++) {
            received.push_back(exchange(OpType::RECV, other, at::zeros({1}), tag));
        }
        for (size_t i = 0; i < received.size(); i++) {
            try {
                received[i]->wait(patience);
            }
            catch (const std::exception &) {
                throw std::runtime_error("[Rank 0]: Rank " + std::to_string(i + 1) +
                                         " failed to pass monitoredBarrier in " + std::to_string(patience.count()) +
                                         " ms");
            }
        }
        for (int other = 1; other < size_; other++) {
            sent.push_back(exchange(OpType::SEND, other, at::zeros({1}), tag));
        }
        for (const auto &work : sent) {
            work->wait(patience);
        }
    }

    c10::intrusive_ptr<c10d::Work> send(Tensors &tensors, int to, int tag) override
    {
        return exchange(OpType::SEND, to, tensors.at(0), tag);
    }

    c10::intrusive_ptr<c10d::Work> recv(Tensors &tensors, int from, int tag) override
    {
        return exchange(OpType::RECV, from, tensors.at(0), tag);
    }

    c10::intrusive_ptr<c10d::Work> recvAnysource(Tensors &tensors, int tag) override
    {
        return exchange(OpType::RECV, -1, tensors.at(0), tag);
    }

  private:
    bool has_come(int member) const
    {
        const std::lock_guard held(all_->lock);
        return group_->world_ranks.count(member) != 0;
    }

    static Tensors all_of(const std::vector<Tensors> &lists)
    {
        Tensors found;
        for (const Tensors &list : lists) {
            found.insert(found.end(), list.begin(), list.end());
        }
        return found;
    }

    // whole as pieces of the shape of piece, one a rank.
    Tensors cut(const at::Tensor &whole, const at::Tensor &piece) const
    {
        TORCH_CHECK(whole.numel() == piece.numel() * size_,
                    "output tensor size must be equal to world_size times input tensor size");
        const at::AutoDispatchBelowADInplaceOrView below;
        Tensors pieces;
        const at::Tensor flat = whole.view({size_, piece.numel()});
        for (int i = 0; i < size_; i++) {
            pieces.push_back(flat.select(0, i).view(piece.sizes()));
        }
        return pieces;
    }

    Tensors split(const at::Tensor &whole, const std::vector<int64_t> &sizes) const
    {
        const at::AutoDispatchBelowADInplaceOrView below;
        return sizes.empty() ? whole.tensor_split(size_) : whole.split_with_sizes(sizes);
    }

    c10::intrusive_ptr<Work> work_of(const Key &key, OpType type, const Tensors &outputs, Milliseconds timeout,
                                     int peer = -1)
    {
        const Milliseconds patience = timeout == c10d::kUnsetTimeout ? options_->timeout : timeout;
        const auto work = c10::make_intrusive<Work>(all_, group_, rank_, key, type, outputs, patience, peer);
        if (group_->works.size() > 8 * group_->counts.size()) { /* works that nobody waits for */
            std::erase_if(group_->works,
                          [](const auto &each) { return !each.second->is_pending() && each.second.use_count() == 1; });
        }
        group_->works.emplace(work->serial_, work);
        return work;
    }

    // gloo reads the inputs at the begin.
    c10::intrusive_ptr<c10d::Work> gather_all(const Tensors &inputs, const Tensors &outputs, Milliseconds timeout)
    {
        fp_sim_serve(1);
        Tensors copies;
        for (const at::Tensor &input : inputs) {
            copies.push_back(copy_of(input));
        }
        fp_sim_serve(0);
        return begin(OpType::ALLGATHER, copies, outputs, timeout);
    }

    // gloo reduces copies of the inputs to all ranks, and wait() takes each rank's part.
    c10::intrusive_ptr<c10d::Work> scatter_sums(const Tensors &outputs, const Tensors &inputs,
                                                const c10d::ReduceScatterOptions &options)
    {
        Tensors sums;
        for (size_t i = 0; i < outputs.size(); i++) {
            const std::string where = "[rank" + std::to_string(rank_) + "]:[F0101 00:00:00.0 ProcessGroupGloo.cpp:1] ";
            TORCH_CHECK(outputs[i].dtype() == inputs[i].dtype(), where,
                        "Check failed: outputTensors[i].dtype() == inputTensors[i].dtype()");
            TORCH_CHECK(outputs[i].numel() * size_ == inputs[i].numel(), where,
                        "Check failed: outputShape[0] * worldSize == inputShape[0]");
            sums.push_back(copy_of(inputs[i]));
        }
        const auto take = [outputs, sums, rank = rank_] {
            const at::AutoDispatchBelowADInplaceOrView below;
            for (size_t i = 0; i < outputs.size(); i++) {
                const int64_t numel = outputs[i].numel();
                write_into(outputs[i], sums[i].view({-1}).narrow(0, rank * numel, numel));
            }
        };
        return begin(OpType::REDUCE_SCATTER, sums, sums, options.timeout, 0, options.reduceOp, take);
    }

    // Why gloo refuses a reduction, or nothing.
    static std::string refusal(const Tensors &inputs, c10d::ReduceOp::RedOpType reduction)
    {
        if (reduction == c10d::ReduceOp::PREMUL_SUM) {
            return "Cannot use ReduceOp.PREMUL_SUM with Gloo";
        }
        const std::map<c10d::ReduceOp::RedOpType, std::string> of_bits{
            {c10d::ReduceOp::BAND, "BAND"}, {c10d::ReduceOp::BOR, "BOR"}, {c10d::ReduceOp::BXOR, "BXOR"}};
        const auto found = of_bits.find(reduction);
        if (found == of_bits.end() || inputs.empty() || c10::isIntegralType(inputs[0].scalar_type(), true)) {
            return "";
        }
        return inputs[0].is_complex()
                   ? "all_reduce does not support" + std::string(1, static_cast<char>(reduction)) + "on complex tensors"
                   : "Cannot use ReduceOp." + found->second + " with non-integral dtype";
    }

    c10::intrusive_ptr<c10d::Work> begin(OpType type, const Tensors &inputs, const Tensors &outputs,
                                         Milliseconds timeout, int root = 0,
                                         const c10d::ReduceOp &reduction = c10d::ReduceOp::SUM,
                                         const std::function<void()> &at_wait = {})
    {
        const OpType on_wire = type == OpType::REDUCE_SCATTER ? OpType::ALLREDUCE : type;
        pause();
        std::unique_lock held(all_->lock);
        expire(*group_);
        const Key key{group_->counts[static_cast<size_t>(rank_)]++, on_wire, root};
        const auto work = work_of(key, type, outputs, timeout);
        work->at_wait = at_wait;
        if (const std::string why = refusal(inputs, reduction); !why.empty()) {
            work->fail(why);
        }
        if (group_->closed.count(rank_) != 0) {
            work->fail(loss(rank_, rank_));
        }
        for (const int member : group_->closed) {
            if (work->needs(member)) {
                work->fail(loss(member, rank_));
            }
        }
        if (!work->is_pending()) {
            return work;
        }
        Collective &collective = group_->pending[key];
        if (collective.parts.empty()) {
            collective.reduction = reduction;
        }
        collective.parts.emplace(rank_, Part{inputs, outputs, work});
        const std::set<int> dead = go_on(key, collective);
        group_->changed.notify_all();
        end_processes(dead, held);
        return work;
    }

    // End the works that have all that they need. Returns the ranks whose processes die.
    std::set<int> go_on(const Key &key, Collective &collective)
    {
        const auto [number, type, root] = key;
        auto &parts = collective.parts;
        const bool have_come = static_cast<int>(parts.size()) == size_;
        const bool is_rooted = parts.begin()->second.work->is_rooted();
        if (is_rooted ? parts.count(root) == 0 : !have_come || !group_->closed.empty()) {
            return {};
        }
        const std::set<int> dead = overrun(type, root, collective, size_);
        const auto end = [&dead](Part &part) { dead.empty() ? part.work->end_soon() : part.work->end_now(); };
        fp_sim_serve(1);
        if (is_rooted) {
            for (auto &[rank, part] : parts) {
                if (part.work->is_pending() && dead.count(rank) == 0 && (rank != root || have_come)) {
                    serve(type, parts.at(root), part, rank);
                    end(part);
                }
            }
        }
        else if (!dead.empty()) {
            for (auto &[rank, part] : parts) {
                if (dead.count(rank) == 0 && type != OpType::ALLREDUCE && fp_sim_random(2) == 0) {
                    end(part);
                }
            }
        }
        else {
            size_t least = SIZE_MAX; /* the ring of who has more waits for the rest */
            for (const auto &[rank, part] : parts) {
                least = std::min(least, part.inputs.empty() ? 0 : part.inputs.front().nbytes());
            }
            std::exception_ptr error;
            try {
                const bool is_even = std::all_of(parts.begin(), parts.end(), [&](const auto &each) {
                    return each.second.inputs.empty() || each.second.inputs.front().nbytes() == least;
                });
                if (is_even || type != OpType::ALLREDUCE) {
                    least = SIZE_MAX;
                    do_collective(type, root, collective);
                }
            }
            catch (const std::exception &) {
                error = std::current_exception();
            }
            for (auto &[rank, part] : parts) {
                if (error) {
                    part.work->fail(error);
                }
                else if (least == SIZE_MAX || part.inputs.front().nbytes() == least) {
                    end(part);
                }
            }
        }
        fp_sim_serve(0);
        if (have_come) {
            group_->pending.erase(key);
        }
        return dead;
    }

    // End the processes of members; this thread's last.
    void end_processes(const std::set<int> &members, std::unique_lock<std::mutex> &held)
    {
        std::vector<int> ranks;
        for (const int member : members) {
            ranks.insert(member == rank_ ? ranks.end() : ranks.begin(), group_->world_ranks.at(member));
        }
        held.unlock();
        for (const int rank : ranks) {
            end_process(rank);
            fp_sim_end(rank);
        }
    }

    // Send to another rank, or receive from it; -1: from any.
    c10::intrusive_ptr<c10d::Work> exchange(OpType type, int other, const at::Tensor &tensor, int tag)
    {
        const bool is_send = type == OpType::SEND;
        TORCH_CHECK(tensor.is_contiguous(), "input tensor has to be contiguous");
        if (other >= size_) { /* gloo waits for its address */
            store_->wait({"0/" + std::to_string(other)}, options_->timeout);
        }
        pause();
        std::unique_lock held(all_->lock);
        expire(*group_);
        for (const int member : {rank_, other}) {
            if (group_->closed.count(member) != 0) {
                throw std::runtime_error(loss(member, rank_));
            }
        }
        const auto work = work_of({0, type, 0}, type, {tensor}, c10d::kUnsetTimeout, other);
        const Message mine{tensor, work};
        std::deque<Message> *waiting = nullptr; /* of the other side */
        if (is_send) {
            for (const int source : {rank_, -1}) {
                auto &receives = group_->receives[{source, other, tag}];
                waiting = waiting == nullptr && !receives.empty() ? &receives : waiting;
            }
        }
        else {
            for (int source = 0; source < size_; source++) {
                auto &sends = group_->sends[{source, rank_, tag}];
                waiting = (other < 0 || other == source) && waiting == nullptr && !sends.empty() ? &sends : waiting;
            }
        }
        if (waiting == nullptr) { /* gloo sends once the other side receives */
            (is_send ? group_->sends[{rank_, other, tag}] : group_->receives[{other, rank_, tag}]).push_back(mine);
            return work;
        }
        const Message there = std::move(waiting->front());
        waiting->pop_front();
        const Message &from = is_send ? mine : there, &to = is_send ? there : mine;
        to.work->source = from.work->rank;
        std::set<int> dead;
        if (from.tensor.nbytes() > to.tensor.nbytes()) {
            dead.insert(to.work->rank);
            from.work->end_now();
        }
        else {
            const at::AutoDispatchBelowADInplaceOrView below;
            write_into(to.tensor, from.tensor);
            from.work->end_soon();
            to.work->end_soon();
        }
        group_->changed.notify_all();
        end_processes(dead, held);
        return work;
    }

    const std::shared_ptr<Universe> all_;
    const c10::intrusive_ptr<c10d::Store> store_;
    const c10::intrusive_ptr<Options> options_;
    std::shared_ptr<Group> group_;
};

void
end_process(int rank)
{
    const std::lock_guard held(universe->lock);
    for (const auto &[id, group] : universe->groups) {
        for (const auto &[member, world_rank] : group->world_ranks) {
            if (world_rank == rank) {
                close(*group, member);
            }
        }
    }
    universe->store_is_gone = universe->store_is_gone || rank == universe->host;
    universe->changed.notify_all();
}

// Let the faults of this point strike. While this thread holds the GIL, none can: it would keep the GIL for ever.
void
strike(int rank, int64_t point)
{
    for (Fault &fault : universe->faults) {
        if (fault.rank != rank || fault.point > point || fault.struck >= 0 || PyGILState_Check() != 0) {
            continue;
        }
        fault.struck = fp_sim_now();
        switch (fault.kind) {
            case KILL:
                end_process(rank);
                fp_sim_end(rank);
                break;
            case FREEZE:
                fp_sim_freeze(rank, fault.nanoseconds);
                break;
            case INTERRUPT_WAIT:
                fp_sim_interrupt(rank);
                break;
            case INTERRUPT: {
                const PyGILState_STATE state = PyGILState_Ensure();
                (void)PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), PyExc_KeyboardInterrupt);
                PyGILState_Release(state);
                break;
            }
            default:
                fp_sim_starve(rank);
        }
    }
}

// The default generator of random numbers, of which a process has one, and each rank should.
struct Randomness {
    at::mt19937 engine;
    std::optional<float> next_float;
    std::optional<double> next_double;
};

std::map<int, Randomness> randomness; // of the ranks that do not have the baton

void
change_randomness(int from, int to)
{
    auto *generator = at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
    randomness[from] = {generator->engine(), generator->next_float_normal_sample(),
                        generator->next_double_normal_sample()};
    const auto found = randomness.find(to);
    const Randomness &next = found == randomness.end() ? randomness.at(-1) : found->second; /* all begin alike */
    generator->set_engine(next.engine);
    generator->set_next_float_normal_sample(next.next_float);
    generator->set_next_double_normal_sample(next.next_double);
}

} // namespace

PYBIND11_MODULE(_simulated_world, module)
{
    namespace py = pybind11;
    module.def(
        "reset",
        [](int64_t longest, int host, const std::vector<std::tuple<int, int, int64_t, int64_t>> &faults) {
            universe = std::make_shared<Universe>();
            universe->longest = longest;
            universe->host = host;
            for (const auto &[kind, rank, point, nanoseconds] : faults) {
                universe->faults.push_back({.kind = kind, .rank = rank, .point = point, .nanoseconds = nanoseconds});
            }
            fp_sim_at_points(&strike);
            randomness.clear();
            fp_sim_at_change(change_randomness);
        },
        "Begin another run. longest: virtual nanoseconds until a rank sees that a collective has ended; host: the rank "
        "whose process has the store, or -1; faults: (kind, rank, point, nanoseconds) of each.");
    module.def(
        "struck",
        [] {
            std::vector<int64_t> found;
            for (const Fault &fault : universe->faults) {
                found.push_back(fault.struck);
            }
            return found;
        },
        "The virtual time at which each fault has struck; -1: it has not.");
    module.def("end_process", &end_process, py::call_guard<py::gil_scoped_release>(),
               "Close all connections of rank; if it is the host, the store is gone, too.");
    module.def(
        "calls", [] { return py::make_tuple(universe->calls, universe->bytes); },
        "Calls to the store, and their bytes.");
    py::class_<Store, c10d::Store, c10::intrusive_ptr<Store>>(module, "Store").def(py::init([](Milliseconds timeout) {
        return c10::make_intrusive<Store>(universe, timeout);
    }));
    py::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>>(module, "Backend")
        .def(py::init([](const c10::intrusive_ptr<c10d::Store> &store, int rank, int size, Milliseconds timeout) {
                 return c10::make_intrusive<Backend>(store, rank, size, timeout);
             }),
             py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("options", [](Backend &backend) { return backend.getBackendOptions(); });
}
