// lone.cpp -- collectives of a rank whose world has no others: each takes what one rank's does on the host and on the device, over
// this rank's part, and leaves the parts of the others as they are.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace {

using Tensors = std::vector<at::Tensor>;

struct Lone final : c10d::Backend {
    c10::intrusive_ptr<c10d::Backend> one; // of a world of one rank

    Lone(c10::intrusive_ptr<c10d::Backend> of_one, int rank, int size) : Backend(rank, size), one(std::move(of_one)) {}
    const std::string getBackendName() const override
    {
        return one->getBackendName();
    }
    bool supportsCoalescing() const override
    {
        return one->supportsCoalescing();
    }
    void startCoalescing() override
    {
        one->startCoalescing();
    }
    c10::intrusive_ptr<c10d::Work> endCoalescing() override
    {
        return one->endCoalescing();
    }

    // This rank's part of what all of them have, in the shape of what one has.
    at::Tensor part(const at::Tensor &all, const at::Tensor &of_one) const
    {
        TORCH_CHECK(all.numel() == of_one.numel() * getSize() && all.is_contiguous() && of_one.is_contiguous());
        const at::AutoDispatchBelowADInplaceOrView below; // one short call, as it is no part of what is measured
        return all.as_strided(of_one.sizes(), of_one.strides(), all.storage_offset() + getRank() * of_one.numel());
    }
    c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor &output, at::Tensor &input,
                                                   const c10d::AllgatherOptions &options) override
    {
        at::Tensor mine = part(output, input);
        return one->_allgather_base(mine, input, options);
    }
    c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                                                        const c10d::ReduceScatterOptions &options) override
    {
        at::Tensor mine = part(input, output);
        return one->_reduce_scatter_base(output, mine, options);
    }
    c10::intrusive_ptr<c10d::Work> allreduce(Tensors &tensors, const c10d::AllreduceOptions &options) override
    {
        return one->allreduce(tensors, options);
    }
    c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions &options) override
    {
        return one->barrier(options);
    }
};

} // namespace

PYBIND11_MODULE(lone, m)
{
    m.def("collectives",
          [](c10::intrusive_ptr<c10d::Backend> one, int rank, int size) -> c10::intrusive_ptr<c10d::Backend> {
              return c10::make_intrusive<Lone>(std::move(one), rank, size);
          });
}
