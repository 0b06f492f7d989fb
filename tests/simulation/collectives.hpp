// simulation/collectives.hpp -- the values of collectives: the rank that comes last does one on the tensors of all ranks, in
// the order of ranks. Tensors are written as gloo writes them: through their address, without a new version.
#pragma once

#include "work.hpp"

#include <cstring>

namespace {

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

} // namespace
