// staged.cpp -- collectives of ranks that share one accelerator, which NCCL does not have: gloo's, on copies in host memory.
//
// What the current stream has to do comes before; the copies are on a stream of the group, which whoever waits waits for, as
// with NCCL. The host waits for the copies to it and for gloo, by events alone. Works on whatever device has streams.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace {

using Tensors = std::vector<at::Tensor>;

c10::Event
recorded(const c10::Stream &stream)
{
    c10::Event event(stream.device_type());
    event.record(stream);
    return event;
}

c10::Stream
current_stream(const c10::Device &device)
{
    return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// The current stream waits for it, and the host does not.
struct Copied final : c10d::Work {
    c10::Device device;
    std::shared_ptr<c10::Event> event;
    Tensors kept; // until somebody waits

    Copied(const c10::Device &on, c10::Event &&done, Tensors &&tensors)
        : device(on), event(std::make_shared<c10::Event>(std::move(done))), kept(std::move(tensors))
    {
    }
    bool isCompleted() override
    {
        return event->query();
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
        event->block(current_stream(device));
        kept.clear();
    }
};

struct Staged final : c10d::Backend {
    c10::intrusive_ptr<c10d::Backend> host;
    std::optional<c10::Stream> own;
    c10::intrusive_ptr<c10d::Work> last;

    explicit Staged(c10::intrusive_ptr<c10d::Backend> gloo)
        : Backend(gloo->getRank(), gloo->getSize()), host(std::move(gloo))
    {
    }
    const std::string getBackendName() const override
    {
        return "nccl"; // whose ways it has
    }
    void abort() override
    {
        host->abort();
    }
    bool supportsCoalescing() const override
    {
        return true;
    }
    void startCoalescing() override {}
    c10::intrusive_ptr<c10d::Work> endCoalescing() override
    {
        return std::move(last); // its stream does all of them in order
    }

    // start(copies of `read` on the host, made) begins gloo's work, which writes to made; that is copied to `written`.
    template <class Start>
    c10::intrusive_ptr<c10d::Work> done(const Tensors &read, const Tensors &written, const Start &start)
    {
        const c10::Device device = read.at(0).device();
        if (!own) {
            own = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/false);
        }
        c10::Event before = recorded(current_stream(device));
        before.block(*own);
        const c10::StreamGuard on_own(*own);
        Tensors from, kept = written;
        for (const at::Tensor &tensor : read) {
            from.push_back(room_for(tensor));
            from.back().copy_(tensor, /*non_blocking=*/true);
        }
        kept.insert(kept.end(), read.begin(), read.end());
        recorded(*own).synchronize();
        Tensors made;
        start(from, made)->wait();
        TORCH_CHECK(made.size() == written.size());
        for (size_t i = 0; i < written.size(); i++) {
            at::Tensor(written[i]).copy_(made[i], /*non_blocking=*/true);
        }
        last = c10::make_intrusive<Copied>(device, recorded(*own), std::move(kept));
        return last;
    }

    // Host memory for what a tensor has.
    static at::Tensor room_for(const at::Tensor &tensor)
    {
        return at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true));
    }

    // What NCCL multiplies as it adds up, and gloo then has to.
    static void multiply(const at::Tensor &tensor, c10d::ReduceOp &op)
    {
        if (op == c10d::ReduceOp::PREMUL_SUM) {
            tensor.mul_(static_cast<c10d::NCCLPreMulSumSupplement *>(op.supplement_.get())->double_factor);
            op = c10d::ReduceOp::SUM;
        }
    }

    c10::intrusive_ptr<c10d::Work> broadcast(Tensors &tensors, const c10d::BroadcastOptions &options) override
    {
        return done(tensors, tensors, [&](Tensors &from, Tensors &made) {
            made = from;
            return host->broadcast(made, options);
        });
    }
    c10::intrusive_ptr<c10d::Work> allreduce(Tensors &tensors, const c10d::AllreduceOptions &options) override
    {
        return done(tensors, tensors, [&](Tensors &from, Tensors &made) {
            c10d::AllreduceOptions of_host = options;
            multiply(from[0], of_host.reduceOp);
            made = from;
            return host->allreduce(made, of_host);
        });
    }
    c10::intrusive_ptr<c10d::Work> allgather(std::vector<Tensors> &outputs, Tensors &inputs,
                                             const c10d::AllgatherOptions &options) override
    {
        return done(inputs, outputs.at(0), [&](Tensors &from, Tensors &made) {
            for (const at::Tensor &output : outputs[0]) {
                made.push_back(room_for(output));
            }
            std::vector<Tensors> lists = {made};
            return host->allgather(lists, from, options);
        });
    }
    c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor &output, at::Tensor &input,
                                                   const c10d::AllgatherOptions &options) override
    {
        return done({input}, {output}, [&](Tensors &from, Tensors &made) {
            made.push_back(room_for(output));
            return host->_allgather_base(made[0], from[0], options);
        });
    }
    c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                                                        const c10d::ReduceScatterOptions &options) override
    {
        return done({input}, {output}, [&](Tensors &from, Tensors &made) {
            c10d::ReduceScatterOptions of_host = options;
            multiply(from[0], of_host.reduceOp);
            made.push_back(room_for(output));
            return host->_reduce_scatter_base(made[0], from[0], of_host);
        });
    }
    c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor &output, at::Tensor &input, std::vector<int64_t> &received,
                                                 std::vector<int64_t> &sent,
                                                 const c10d::AllToAllOptions &options) override
    {
        return done({input}, {output}, [&](Tensors &from, Tensors &made) {
            made.push_back(room_for(output));
            return host->alltoall_base(made[0], from[0], received, sent, options);
        });
    }
    c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions &options) override
    {
        return host->barrier(options);
    }
};

} // namespace

PYBIND11_MODULE(staged, m)
{
    m.def("collectives", [](c10::intrusive_ptr<c10d::Backend> host) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<Staged>(std::move(host));
    });
}
