// simulation/world.cpp -- the module _simulated_world: a c10d store and a c10d backend for ranks that are threads of one
// process. They behave as TCPStore and as gloo do (conformance.py says in which facts); the backend's name is "gloo".
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

struct Collective {
    OpType type = OpType::UNKNOWN;
    int root = 0;
    c10d::ReduceOp::RedOpType reduction = c10d::ReduceOp::SUM;
    std::map<int, Part> parts; // by the rank in the group
};

struct Message {
    at::Tensor tensor; // of a send: a copy; of a receive: to be written
    c10::intrusive_ptr<Work> work;
};

using Channel = std::tuple<int, int, int>; // source, destination, tag

struct Group {
    std::condition_variable changed; // with the lock of the universe
    int size = 0;
    std::map<int, int> world_ranks;         // of the members that have come, by the rank in the group
    std::vector<uint64_t> counts;           // collectives that each rank has begun
    std::map<uint64_t, Collective> pending; // by number
    std::map<Channel, std::deque<Message>> sends, receives;
    std::set<c10::intrusive_ptr<Work>> works;                    // that have not ended
    Clock::time_point first_deadline = Clock::time_point::max(); // of pending works, or an earlier time
    std::map<int, std::string> closed; // ranks whose connections are closed, and why they see it
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
    int64_t calls = 0;                   // to the store
    int64_t bytes = 0;                   // that went to the store and came from it
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

class Store : public c10d::Store {
  public:
    explicit Store(std::shared_ptr<Universe> all, Milliseconds timeout) : c10d::Store(timeout), all_(std::move(all)) {}

    c10::intrusive_ptr<c10d::Store> clone() override
    {
        ask();
        return c10::make_intrusive<Store>(all_, timeout_);
    }

    using c10d::Store::compareSet;
    using c10d::Store::set;

    void set(const std::string &key, const Bytes &value) override
    {
        const auto held = ask(value.size());
        all_->values[common(key)] = value;
        all_->changed.notify_all();
    }

    Bytes compareSet(const std::string &key, const Bytes &expected, const Bytes &wanted) override
    {
        const auto held = ask(wanted.size());
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
        const auto held = ask(8);
        Bytes &found = all_->values[common(key)];
        const int64_t sum = value + (found.empty() ? 0 : std::stoll(std::string(found.begin(), found.end())));
        found = as_bytes(std::to_string(sum));
        all_->changed.notify_all();
        return sum;
    }

    bool deleteKey(const std::string &key) override
    {
        const auto held = ask();
        return all_->values.erase(common(key)) != 0;
    }

    bool check(const std::vector<std::string> &keys) override
    {
        const auto held = ask();
        return has(keys);
    }

    int64_t getNumKeys() override
    {
        const auto held = ask();
        return static_cast<int64_t>(all_->values.size());
    }

    void wait(const std::vector<std::string> &keys) override
    {
        wait(keys, timeout_);
    }

    void wait(const std::vector<std::string> &keys, const Milliseconds &timeout) override
    {
        auto held = ask();
        size_t n = 0; /* of the keys that are there: many ranks wait for many keys */
        const auto has_come = [&] {
            while (n < keys.size() && all_->values.count(common(keys[n])) != 0) {
                n++;
            }
            return all_->store_is_gone || n == keys.size();
        };
        if (timeout == kNoTimeout) {
            all_->changed.wait(held, has_come);
        }
        else if (!all_->changed.wait_for(held, timeout, has_come)) {
            C10_THROW_ERROR(DistStoreError, "wait timeout after " + std::to_string(timeout.count()) +
                                                "ms, keys: " + c10::Join(", ", keys));
        }
        throw_if_gone();
    }

    void append(const std::string &key, const Bytes &value) override
    {
        const auto held = ask(value.size());
        Bytes &found = all_->values[common(key)];
        found.insert(found.end(), value.begin(), value.end());
        all_->changed.notify_all();
    }

    std::vector<Bytes> multiGet(const std::vector<std::string> &keys) override
    {
        wait(keys);
        const std::lock_guard held(all_->lock);
        std::vector<Bytes> found;
        for (const std::string &key : keys) {
            found.push_back(all_->values.at(common(key)));
            all_->bytes += static_cast<int64_t>(found.back().size());
        }
        return found;
    }

    void multiSet(const std::vector<std::string> &keys, const std::vector<Bytes> &values) override
    {
        const auto held = ask();
        for (size_t i = 0; i < keys.size(); i++) {
            all_->values[common(keys[i])] = values[i];
        }
        all_->changed.notify_all();
    }

    bool hasExtendedApi() const override
    {
        return true;
    }

  private:
    std::unique_lock<std::mutex> ask(size_t bytes = 0)
    {
        pause();
        std::unique_lock held(all_->lock);
        all_->calls++;
        all_->bytes += static_cast<int64_t>(bytes);
        throw_if_gone();
        return held;
    }

    void throw_if_gone() const
    {
        if (all_->store_is_gone) {
            C10_THROW_ERROR(DistNetworkError,
                            "failed to recv, got 0 bytes. Connection was likely closed. Did the remote "
                            "server shutdown or crash?");
        }
    }

    bool has(const std::vector<std::string> &keys) const
    {
        return std::all_of(keys.begin(), keys.end(),
                           [this](const auto &key) { return all_->values.count(common(key)) != 0; });
    }

    const std::shared_ptr<Universe> all_;
};

// A collective of one rank. The lock of the universe protects all of it.
class Work : public c10d::Work {
  public:
    Work(std::shared_ptr<Universe> all, std::shared_ptr<Group> group, int rank, OpType type, Tensors outputs,
         Milliseconds timeout, uint64_t number, int peer)
        : c10d::Work(rank, type), began(Clock::now()), deadline(began + timeout), timeout(timeout), rank(rank),
          peer(peer), all_(std::move(all)), group_(std::move(group)), outputs_(std::move(outputs)), number_(number),
          future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get())))
    {
    }

    bool isCompleted() override
    {
        pause();
        const std::lock_guard held(all_->lock);
        bring_up_to_date();
        return has_ended_;
    }

    bool isSuccess() const override
    {
        const std::lock_guard held(all_->lock);
        return has_ended_ && !error_;
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
            const Clock::time_point last = patience == kNoTimeout ? Clock::time_point::max() : Clock::now() + patience;
            for (bring_up_to_date(); !has_ended_; bring_up_to_date()) {
                if (Clock::now() >= last) {
                    throw std::runtime_error("Operation timed out!"); /* torch's Work::wait() */
                }
                group_->changed.wait_until(held, std::min(last, ends_at_.value_or(group_->first_deadline)));
            }
        }
        if (error_) {
            std::rethrow_exception(error_);
        }
        return true;
    }

    void synchronize() override {}

    Tensors result() override
    {
        return outputs_;
    }

    uint64_t getSequencenumber() const override
    {
        return number_;
    }

    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override
    {
        return future_;
    }

    // It has ended well; this rank sees that in a while.
    void end_soon()
    {
        ends_at_ = Clock::now() + std::chrono::nanoseconds(fp_sim_random(static_cast<uint64_t>(all_->longest) + 1));
    }

    void fail(const std::string &why)
    {
        if (!ends_at_ && !has_ended_) {
            error_ = std::make_exception_ptr(std::runtime_error(why));
            end();
        }
    }

    // Whether it and another are of one collective, which has not ended for either.
    bool has_the_number_of(const Work &other) const
    {
        return number_ == other.number_ && peer < 0 && other.peer < 0 && !has_ended_ && !other.has_ended_;
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

    const Clock::time_point began, deadline;
    const Milliseconds timeout;
    const int rank; // in the group
    const int peer; // the only other rank that it waits for; -1: all

  private:
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
    const uint64_t number_;
    const c10::intrusive_ptr<c10::ivalue::Future> future_;
    std::optional<Clock::time_point> ends_at_; // set once all ranks have come
    bool has_ended_ = false;
    std::exception_ptr error_;
};

const std::string CLOSED =
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:";

std::string
closed_by(int rank)
{
    return CLOSED + std::to_string(20000 + rank);
}

// Close the connections of a member: what waits for it fails, now and later. If it was in the midst of a collective, some
// ranks may have got from it all that they need, and others not.
void
close(Group &group, int member)
{
    if (group.closed.count(member) != 0) {
        return;
    }
    group.closed[member] = closed_by(member);
    for (const auto &mine : group.works) {
        for (const auto &work : group.works) {
            if (mine->rank == member && work->has_the_number_of(*mine) && fp_sim_random(2) == 0) {
                work->tear(group.closed[member]);
            }
        }
    }
    for (const auto &work : std::vector<c10::intrusive_ptr<Work>>(group.works.begin(), group.works.end())) {
        if (work->peer < 0 || work->peer == member || work->rank == member) {
            work->fail(group.closed[member]);
        }
    }
    group.changed.notify_all();
}

// Fail the works whose time is over; the rank of such a work closes its connections.
void
expire(Group &group)
{
    const Clock::time_point now = Clock::now();
    if (now < group.first_deadline) {
        return;
    }
    for (const auto &work : std::vector<c10::intrusive_ptr<Work>>(group.works.begin(), group.works.end())) {
        if (work->is_pending() && work->deadline <= now) {
            work->fail("[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting " +
                       std::to_string(work->timeout.count()) + "ms for recv operation to complete");
            close(group, work->rank);
        }
    }
    group.first_deadline = Clock::time_point::max();
    for (const auto &work : group.works) {
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
        group_->works.erase(c10::intrusive_ptr<Work>::reclaim_copy(this));
    }
}

// The same memory without autograd: writing to it makes no new version.
at::Tensor
plain(const at::Tensor &tensor)
{
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().requires_grad(false));
}

void
write_into(const at::Tensor &to, const at::Tensor &from)
{
    if (to.numel() == 0) {
        return;
    }
    if (to.is_contiguous() && from.is_contiguous() && to.nbytes() == from.nbytes()) {
        std::memcpy(to.data_ptr(), from.data_ptr(), to.nbytes());
    }
    else {
        plain(to).copy_(plain(from).view(to.sizes()));
    }
}

at::Tensor
reduced(const Tensors &inputs, c10d::ReduceOp::RedOpType reduction)
{
    at::Tensor sum = inputs.front().numel() == 0 ? inputs.front().clone() : plain(inputs.front()).clone();
    for (size_t i = 1; i < inputs.size() && sum.numel() != 0; i++) {
        const at::Tensor next = plain(inputs[i]).view(sum.sizes());
        switch (reduction) {
            case c10d::ReduceOp::SUM:
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

// Do what all ranks have come to. Inputs and outputs of a rank:
//   all-reduce     tensors; the same ones
//   broadcast      tensors; the same ones
//   reduce         tensors; the same ones
//   all-gather     tensors; for each of them one output a rank, in turn
//   gather         a tensor; on the root one output a rank
//   scatter        on the root one input a rank; a tensor
//   reduce-scatter for each output one input a rank, in turn; tensors
//   all-to-all     one input a rank; one output a rank
void
do_collective(Collective &collective, int size)
{
    const at::AutoDispatchBelowADInplaceOrView below;
    const size_t n = static_cast<size_t>(size);
    auto &parts = collective.parts;
    Part &root = parts.at(collective.root);
    switch (collective.type) {
        case OpType::ALLREDUCE:
        case OpType::REDUCE:
            for (size_t i = 0; i < root.inputs.size(); i++) {
                const at::Tensor sum = reduced(inputs_of(collective, i), collective.reduction);
                for (auto &[rank, part] : parts) {
                    if (collective.type == OpType::ALLREDUCE || rank == collective.root) {
                        write_into(part.outputs[i], sum);
                    }
                }
            }
            break;
        case OpType::BROADCAST:
            for (auto &[rank, part] : parts) {
                for (size_t i = 0; i < part.outputs.size() && rank != collective.root; i++) {
                    write_into(part.outputs[i], root.inputs[i]);
                }
            }
            break;
        case OpType::ALLGATHER: {
            std::vector<Tensors> sent;
            for (size_t i = 0; i < root.inputs.size(); i++) {
                for (const at::Tensor &input : inputs_of(collective, i)) {
                    sent.emplace_back(
                        Tensors{input.numel() == 0 ? input : plain(input).clone()}); /* outputs may overlap inputs */
                }
            }
            for (auto &[rank, part] : parts) {
                for (size_t i = 0; i < part.outputs.size(); i++) {
                    write_into(part.outputs[i], sent[i].front());
                }
            }
            break;
        }
        case OpType::GATHER:
            for (size_t i = 0; i < n; i++) {
                write_into(root.outputs[i], parts.at(static_cast<int>(i)).inputs[0]);
            }
            break;
        case OpType::SCATTER:
            for (auto &[rank, part] : parts) {
                write_into(part.outputs[0], root.inputs[static_cast<size_t>(rank)]);
            }
            break;
        case OpType::REDUCE_SCATTER: {
            std::vector<at::Tensor> sums;
            for (size_t i = 0; i < root.inputs.size(); i++) {
                sums.push_back(reduced(inputs_of(collective, i), collective.reduction));
            }
            for (auto &[rank, part] : parts) {
                for (size_t i = 0; i < part.outputs.size(); i++) {
                    write_into(part.outputs[i], sums[i * n + static_cast<size_t>(rank)]);
                }
            }
            break;
        }
        case OpType::ALLTOALL: {
            std::map<int, Tensors> sent;
            for (auto &[rank, part] : parts) {
                for (const at::Tensor &input : part.inputs) {
                    sent[rank].push_back(input.numel() == 0 ? input : plain(input).clone());
                }
            }
            for (auto &[rank, part] : parts) {
                for (size_t i = 0; i < n; i++) {
                    write_into(part.outputs[i], sent[static_cast<int>(i)][static_cast<size_t>(rank)]);
                }
            }
            break;
        }
        default:
            break; /* a barrier */
    }
}

class Backend : public c10d::Backend {
  public:
    Backend(const c10::intrusive_ptr<c10d::Store> &store, int rank, int size, Milliseconds timeout)
        : c10d::Backend(rank, size), all_(universe), options_(c10::make_intrusive<Options>("gloo", timeout))
    {
        const int64_t number = store->add("simulated group, rank " + std::to_string(rank), 1);
        const std::string made = std::to_string(fp_sim_random(1ULL << 40)) + "." + std::to_string(fp_sim_now());
        const std::string id = store->compareSet("simulated group " + std::to_string(number), "", made);
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
        store->set(std::to_string(number) + " has come " + std::to_string(rank), std::string("yes"));
        std::unique_lock held(all_->lock);
        const auto have_come = [&] { return static_cast<int>(group_->world_ranks.size()) == size; };
        if (!group_->changed.wait_for(held, timeout, have_come)) {
            C10_THROW_ERROR(DistStoreError, "wait timeout after " + std::to_string(timeout.count()) +
                                                "ms, keys: " + std::to_string(number) + " has come");
        }
    }

    ~Backend() override
    {
        shutdown();
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

    void shutdown() override
    {
        const std::lock_guard held(all_->lock);
        close(*group_, rank_);
    }

    void abort() override
    {
        shutdown();
    }

    c10::intrusive_ptr<c10d::Work> broadcast(Tensors &tensors, const c10d::BroadcastOptions &options) override
    {
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
        return begin(OpType::ALLGATHER, inputs, all_of(outputs), options.timeout);
    }

    c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor &output, at::Tensor &input,
                                                   const c10d::AllgatherOptions &options) override
    {
        return begin(OpType::ALLGATHER, {input}, cut(output, input), options.timeout);
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
        return begin(OpType::ALLGATHER, inputs, turned, options.timeout);
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
        return begin(OpType::ALLGATHER, inputs, pieces, options.timeout);
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
        return begin(OpType::REDUCE_SCATTER, all_of(inputs), outputs, options.timeout, 0, options.reduceOp);
    }

    c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                                                        const c10d::ReduceScatterOptions &options) override
    {
        return begin(OpType::REDUCE_SCATTER, cut(input, output), {output}, options.timeout, 0, options.reduceOp);
    }

    c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                                                   const c10d::ReduceScatterOptions &options) override
    {
        Tensors pieces;
        for (size_t i = 0; i < outputs.size(); i++) {
            for (const at::Tensor &piece : cut(inputs[i], outputs[i])) {
                pieces.push_back(piece);
            }
        }
        return begin(OpType::REDUCE_SCATTER, pieces, outputs, options.timeout, 0, options.reduceOp);
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
        (void)barrier(options)->wait(kNoTimeout);
    }

    c10::intrusive_ptr<c10d::Work> send(Tensors &tensors, int to, int tag) override
    {
        return exchange(OpType::SEND, {rank_, to, tag}, tensors.at(0), to);
    }

    c10::intrusive_ptr<c10d::Work> recv(Tensors &tensors, int from, int tag) override
    {
        return exchange(OpType::RECV, {from, rank_, tag}, tensors.at(0), from);
    }

  private:
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

    c10::intrusive_ptr<Work> work_of(OpType type, const Tensors &outputs, Milliseconds timeout, uint64_t number,
                                     int peer = -1)
    {
        const Milliseconds patience = timeout == c10d::kUnsetTimeout ? options_->timeout : timeout;
        const auto work = c10::make_intrusive<Work>(all_, group_, rank_, type, outputs, patience, number, peer);
        if (group_->works.size() > 8 * group_->counts.size()) { /* works that nobody waits for */
            std::erase_if(group_->works, [](const auto &each) { return !each->is_pending() && each.use_count() == 1; });
        }
        group_->works.insert(work);
        group_->first_deadline = std::min(group_->first_deadline, work->deadline);
        return work;
    }

    c10::intrusive_ptr<c10d::Work> begin(OpType type, const Tensors &inputs, const Tensors &outputs,
                                         Milliseconds timeout, int root = 0,
                                         const c10d::ReduceOp &reduction = c10d::ReduceOp::SUM)
    {
        TORCH_CHECK(reduction != c10d::ReduceOp::AVG, "Cannot use ReduceOp.AVG with Gloo");
        pause();
        const std::lock_guard held(all_->lock);
        expire(*group_);
        const uint64_t number = group_->counts[static_cast<size_t>(rank_)]++;
        const auto work = work_of(type, outputs, timeout, number);
        if (!group_->closed.empty()) {
            const auto &[member, why] = *group_->closed.begin();
            work->fail(why);
            return work;
        }
        Collective &collective = group_->pending[number];
        if (collective.parts.empty()) {
            collective.type = type;
            collective.root = root;
            collective.reduction = reduction;
        }
        collective.parts.emplace(rank_, Part{inputs, outputs, work});
        if (static_cast<int>(collective.parts.size()) == size_) {
            fp_sim_serve(1);
            do_collective(collective, size_);
            fp_sim_serve(0);
            for (auto &[rank, part] : collective.parts) {
                part.work->end_soon();
            }
            group_->pending.erase(number);
            group_->changed.notify_all();
        }
        return work;
    }

    c10::intrusive_ptr<c10d::Work> exchange(OpType type, const Channel &channel, at::Tensor &tensor, int other)
    {
        pause();
        const std::lock_guard held(all_->lock);
        expire(*group_);
        const at::AutoDispatchBelowADInplaceOrView below;
        const bool is_send = type == OpType::SEND;
        const auto work = work_of(type, {tensor}, c10d::kUnsetTimeout, 0, other);
        if (group_->closed.count(other) != 0) {
            work->fail(group_->closed[other]);
            return work;
        }
        auto &mine = is_send ? group_->sends[channel] : group_->receives[channel];
        auto &others = is_send ? group_->receives[channel] : group_->sends[channel];
        if (others.empty()) {
            mine.push_back(Message{tensor, work}); /* gloo sends once the other side receives */
            return work;
        }
        const Message there = std::move(others.front());
        others.pop_front();
        write_into(is_send ? there.tensor : tensor, is_send ? tensor : there.tensor);
        work->end_soon();
        there.work->end_soon();
        group_->changed.notify_all();
        return work;
    }

    const std::shared_ptr<Universe> all_;
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
