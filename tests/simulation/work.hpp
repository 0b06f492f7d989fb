// simulation/work.hpp -- the works of ranks, which end as gloo's do: well, late, after a time-out, or for a lost rank.
#pragma once

#include "universe.hpp"

#include <algorithm>
#include <exception>
#include <optional>
#include <stdexcept>

#include <ATen/core/ivalue.h>

namespace {

// Frees what belongs to one process of what all have in common: others let it be.
struct OfProcess {
    int home = fp_sim_home();

    template <typename Value> void operator()(Value *value) const
    {
        if (home == fp_sim_home()) {
            delete value;
        }
    }
};

// What the process of a work's rank alone may touch.
struct Own {
    Tensors outputs;    // the caller's
    bool takes = false; // what comes is in common memory, and to be written to them
    // Here, since it counts the references to its type, which each process has for itself
    c10::intrusive_ptr<c10::ivalue::Future> future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    std::function<void()> at_wait; // writes the output
};

at::Tensor plain(const at::Tensor &tensor);
void write_into(const at::Tensor &to, const at::Tensor &from);

// A collective, or a message, of one rank. The lock of the universe protects all of it.
//
// What sends, receives, or reduces and scatters says nothing of its end before wait(), and its time runs from there (of a
// message) or wait() ignores its argument (of a reduce-scatter): torch gives these other classes than the rest.
class Work : public c10d::Work {
  public:
    Work(std::shared_ptr<Universe> all, std::shared_ptr<Group> group, int rank, Key key, OpType type, Tensors outputs,
         Milliseconds timeout, int peer)
        : c10d::Work(rank, type), timeout(timeout), rank(rank), peer(peer), type(type), key(std::move(key)),
          all_(std::move(all)), group_(std::move(group)), outputs_(std::move(outputs)), serial_(group_->begun++)
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
        take();
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
            take();
        }
        if (error_) {
            std::rethrow_exception(error_);
        }
        if (own->at_wait) {
            own->at_wait();
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
        return says_nothing() ? c10d::Work::result() : own->outputs;
    }

    uint64_t getSequencenumber() const override
    {
        return std::get<0>(key);
    }

    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override
    {
        return says_nothing() ? c10d::Work::getFuture() : own->future;
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

    // gloo reads and writes as much memory as the tensors have elements.
    static bool ignores_strides(OpType type)
    {
        return type == OpType::ALLREDUCE || type == OpType::REDUCE || type == OpType::BROADCAST;
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
    int source = -1; // of a message that has come
    const std::unique_ptr<Own, OfProcess> own{new Own};

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
        if (own.get_deleter().home == fp_sim_home()) {
            take();
        }
    }

    // Its own process sees that it has ended.
    void take()
    {
        if (!has_ended_ || own->future->completed()) {
            return;
        }
        if (error_) {
            own->future->setError(error_);
            return;
        }
        if (own->takes) {
            const at::AutoDispatchBelowADInplaceOrView below;
            for (size_t i = 0; i < outputs_.size(); i++) {
                write_into(ignores_strides(type) ? plain(own->outputs[i]) : own->outputs[i], outputs_[i]);
            }
        }
        own->future->markCompleted(c10::IValue(own->outputs));
    }

    void bring_up_to_date();

    const std::shared_ptr<Universe> all_;
    const std::shared_ptr<Group> group_;
    const Tensors outputs_;
    const uint64_t serial_;
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

} // namespace
