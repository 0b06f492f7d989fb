// collectives.hpp -- collectives: gloo's, on the device's memory, on a stream of the group.
#pragma once

#include "operators.hpp"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <thread>

namespace {

auto &under_way = for_good<
    OfRank<std::vector<c10::intrusive_ptr<c10d::Work>>>>(); // that write to the device's memory as early as they can

// A late stream is so late that what may have come before it has, unless that waits for other ranks for too long.
void
finish_collectives()
{
    for (const auto &work : std::exchange(under_way(), {})) {
        try {
            without_gil([&] { work->wait(std::chrono::milliseconds(20)); });
        }
        catch (...) { // whoever waits for it is told
        }
    }
}

// A rank's part of an all-reduce: gloo's reduce-scatter does the same, but its wait() ignores how long it may take, and nothing
// else says that it has ended. A communicator that is aborted could not leave it.
struct Scattered final : c10d::Work {
    c10::intrusive_ptr<c10d::Work> all;
    at::Tensor part, output;

    Scattered(c10::intrusive_ptr<c10d::Work> reduced, at::Tensor from, at::Tensor to)
        : all(std::move(reduced)), part(std::move(from)), output(std::move(to))
    {
    }

    bool isCompleted() override
    {
        return all->isCompleted();
    }
    std::exception_ptr exception() const override
    {
        return all->exception();
    }
    bool wait(std::chrono::milliseconds patience) override
    {
        all->wait(patience);
        output.copy_(part.view_as(output));
        return true;
    }
};

// The current stream waits for it, and the host does not, as NCCL's.
struct Late final : c10d::Work {
    int64_t stream, until;
    int asked = 0;
    bool captured = capturing;
    std::shared_ptr<std::vector<at::Tensor>> kept; // until somebody waits: their memory is used

    Late(int64_t on, int64_t place, std::shared_ptr<std::vector<at::Tensor>> tensors)
        : stream(on), until(place), kept(std::move(tensors))
    {
    }

    bool isCompleted() override
    {
        const Tried locked(mutex(), std::try_to_lock);
        if (!locked) {
            return false;
        }
        if (++asked > SELDOM) {
            proceed(stream, until);
        }
        return queues()[stream].done >= until;
    }
    bool isSuccess() const override
    {
        return true;
    }
    bool wait(std::chrono::milliseconds) override
    {
        synchronize();
        return true;
    }
    void synchronize() override
    {
        std::vector<at::Tensor> freed;
        const Locked locked(mutex());
        check_captured(captured);
        put(current, [on = stream, place = until] { force(on, place); });
        freed.swap(*kept);
    }
};

int registers = 0;       // memory with a group: 0: says that it cannot; 1: fails; 2: does
int64_t fail_after = -1; // so many collectives; negative: never

struct Collectives final : c10d::Backend {
    c10::intrusive_ptr<c10d::Backend> host;
    int64_t stream; // of its own
    bool coalescing = false;
    c10::intrusive_ptr<c10d::Work> last;
    using Aborted = std::shared_ptr<std::atomic<bool>>;
    Aborted aborted = std::make_shared<std::atomic<bool>>(false);

    explicit Collectives(c10::intrusive_ptr<c10d::Backend> gloo)
        : Backend(gloo->getRank(), gloo->getSize()), host(std::move(gloo))
    {
        const Locked locked(mutex());
        stream = ++last_stream;
    }

    const std::string getBackendName() const override
    {
        return "nccl"; // whose ways it has
    }
    c10::intrusive_ptr<Options> getBackendOptions() override
    {
        return host->getBackendOptions();
    }
    void setTimeout(std::chrono::milliseconds timeout) override
    {
        host->setTimeout(timeout);
    }
    bool supportsTensorAlloc(c10::DeviceIndex) override
    {
        return registers > 0;
    }
    at::Tensor allocateTensor(long size, at::TensorOptions options) override
    {
        const Locked locked(mutex());
        TORCH_CHECK(registers > 1, "memory that could not be registered\nand more");
        operations["simulated::registered"]++;
        return at::empty({size}, options);
    }
    bool supportsCoalescing() const override
    {
        return true;
    }
    void startCoalescing() override
    {
        const Locked locked(mutex());
        TORCH_CHECK(!coalescing, "a call for several collectives was not ended");
        coalescing = true;
        operations["simulated::collectives"]++;
    }
    c10::intrusive_ptr<c10d::Work> endCoalescing() override
    {
        coalescing = false;
        return std::move(last); // its stream does all of them in order
    }

    // As NCCL's: what waits for collectives on the device goes on, with whatever is there, and no other one begins. Till then it
    // waits, also for a rank that has ended: a kernel is not told.
    void abort() override
    {
        *aborted = true;
    }
    static void wait_for(c10d::Work &work, const Aborted &aborted)
    {
        without_gil([&] {
            for (bool ended = false; !ended && !*aborted;) {
                try {
                    work.wait(std::chrono::milliseconds(20));
                    ended = true;
                }
                catch (...) {
                    // It may have ended after the time was up: then the next wait() takes what it gives
                    const bool has_ended = work.isCompleted() && work.exception() == nullptr;
                    if (polled && !has_ended && !*aborted) {
                        throw NotYet{};
                    }
                    std::this_thread::sleep_for(std::chrono::milliseconds(has_ended ? 0 : 1));
                }
            }
        });
    }

    // The work of one collective. Within a call for several nobody may wait for it, but for that call's, as with NCCL.
    c10::intrusive_ptr<c10d::Work> work_of(const std::shared_ptr<std::vector<at::Tensor>> &kept)
    {
        last = c10::make_intrusive<Late>(stream, queues()[stream].put, kept);
        if (coalescing) {
            return c10::make_intrusive<Late>(stream, 0, kept);
        }
        return last;
    }

    // What the current stream has to do comes before. gloo begins at once, for which ranks come to it in whichever order. A
    // late stream has it work on copies: what it gives is written when the stream comes to it, and if what was read is not there
    // any more it is NaN, of which who drops it sees nothing.
    template <class Start>
    c10::intrusive_ptr<c10d::Work> started(const std::vector<at::Tensor> &tensors, const std::vector<at::Tensor> &read,
                                           const std::vector<at::Tensor> &written, const Start &start)
    {
        const Locked locked(mutex());
        TORCH_CHECK(!*aborted, "the communicator was aborted");
        TORCH_CHECK(fail_after < 0 || fail_after-- > 0, "a collective that was to fail");
        operations["simulated::collectives"] += !coalescing;
        run(current, queues()[current].put);
        auto kept = std::make_shared<std::vector<at::Tensor>>(tensors);
        std::vector<at::Tensor> from, to;
        std::transform(read.begin(), read.end(), std::back_inserter(from), on_cpu);
        std::transform(written.begin(), written.end(), std::back_inserter(to), on_cpu);
        if (!is_late(stream)) {
            c10::intrusive_ptr<c10d::Work> work;
            without_gil([&] { work = start(from, to); });
            under_way().push_back(work);
            Queue &queue = queues()[stream];
            queue.waiting.push_back([work, kept, ended = aborted] {
                wait_for(*work, ended);
                std::erase(under_way(), work); // gloo writes what it gives whenever somebody waits for it
            });
            queue.put++;
            return work_of(kept);
        }
        std::vector<at::Tensor> read_now, write_now;
        for (const at::Tensor &tensor : from) {
            read_now.push_back(tensor.clone());
        }
        for (size_t i = 0; i < to.size(); i++) { // in place: the same copy
            const auto same = std::find_if(from.begin(), from.end(), [&](const at::Tensor &other) {
                return other.const_data_ptr() == to[i].const_data_ptr() && other.numel() == to[i].numel();
            });
            write_now.push_back(same == from.end() ? to[i].clone()
                                                   : read_now[static_cast<size_t>(same - from.begin())]);
        }
        std::vector<at::Tensor> as_read;
        for (const at::Tensor &tensor : read_now) {
            as_read.push_back(tensor.clone());
        }
        c10::intrusive_ptr<c10d::Work> work;
        without_gil([&] { work = start(read_now, write_now); });
        put(stream, [work, from, to, as_read, write_now, read_now, kept, ended = aborted] {
            wait_for(*work, ended);
            if (*ended) {
                return;
            }
            bool as_it_was = true;
            for (size_t i = 0; i < from.size(); i++) {
                as_it_was = as_it_was &&
                            std::memcmp(from[i].const_data_ptr(), as_read[i].const_data_ptr(), from[i].nbytes()) == 0;
            }
            for (size_t i = 0; i < to.size(); i++) {
                at::Tensor(to[i]).copy_(write_now[i]);
                if (!as_it_was) {
                    std::memset(to[i].mutable_data_ptr(), 0xff, to[i].nbytes());
                }
            }
        });
        return work_of(kept);
    }

    // What NCCL adds up in place of the tensor, and gloo then has to. It takes the factor in the tensor's dtype, which torch
    // 2.13 does not give it for bf16.
    static at::Tensor multiplied(const at::Tensor &tensor, c10d::ReduceOp &op)
    {
        if (op != c10d::ReduceOp::PREMUL_SUM) {
            return tensor;
        }
        TORCH_CHECK(tensor.scalar_type() != at::kBFloat16, "a factor in bf16");
        const double factor = static_cast<c10d::NCCLPreMulSumSupplement *>(op.supplement_.get())->double_factor;
        op = c10d::ReduceOp::SUM;
        operations["simulated::multiplied"]++;
        return tensor.mul(factor);
    }

    c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor> &tensors,
                                             const c10d::BroadcastOptions &options) override
    {
        return started(tensors, tensors, tensors, [&](auto &, auto &to) { return host->broadcast(to, options); });
    }
    c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor> &tensors,
                                             const c10d::AllreduceOptions &options) override
    {
        return started(tensors, tensors, tensors, [&](auto &, auto &to) {
            c10d::AllreduceOptions of_host = options;
            to[0].copy_(multiplied(to[0], of_host.reduceOp));
            return host->allreduce(to, of_host);
        });
    }
    c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>> &outputs,
                                             std::vector<at::Tensor> &inputs,
                                             const c10d::AllgatherOptions &options) override
    {
        TORCH_CHECK(outputs.size() == 1);
        std::vector<at::Tensor> all = outputs[0];
        all.insert(all.end(), inputs.begin(), inputs.end());
        return started(all, inputs, outputs[0], [&](auto &from, auto &to) {
            std::vector<std::vector<at::Tensor>> lists = {to};
            return host->allgather(lists, from, options);
        });
    }
    c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor &output, at::Tensor &input,
                                                   const c10d::AllgatherOptions &options) override
    {
        return started({output, input}, {input}, {output},
                       [&](auto &from, auto &to) { return host->_allgather_base(to[0], from[0], options); });
    }
    c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                                                        const c10d::ReduceScatterOptions &options) override
    {
        return started({output, input}, {input}, {output}, [&](auto &from, auto &to) {
            c10d::AllreduceOptions of_host;
            of_host.reduceOp = options.reduceOp;
            of_host.timeout = options.timeout;
            std::vector<at::Tensor> sums = {multiplied(from[0], of_host.reduceOp).clone()};
            const auto all = host->allreduce(sums, of_host);
            return c10::make_intrusive<Scattered>(all, sums[0].view({getSize(), -1})[getRank()], to[0]);
        });
    }
    c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor &output, at::Tensor &input, std::vector<int64_t> &received,
                                                 std::vector<int64_t> &sent,
                                                 const c10d::AllToAllOptions &options) override
    {
        return started({output, input}, {input}, {output}, [&](auto &from, auto &to) {
            return host->alltoall_base(to[0], from[0], received, sent, options);
        });
    }
    c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions &options) override
    {
        return host->barrier(options);
    }
};

} // namespace
