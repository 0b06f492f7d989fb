// simulation/backend.hpp -- a c10d backend that behaves as gloo does; conformance.py says in which facts. Its name is "gloo".
// Each rank sees a random time later that a collective has ended.
#pragma once

#include "collectives.hpp"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace {

void end_process(int rank);

class Backend : public c10d::Backend {
  public:
    // connects: whether the rank waits here until all have come, and closes its connections at the end, as with gloo. With
    // NCCL it does neither.
    Backend(const c10::intrusive_ptr<c10d::Store> &store, int rank, int size, Milliseconds timeout, bool connects)
        : c10d::Backend(rank, size), all_(universe), store_(store),
          options_(c10::make_intrusive<Options>("gloo", timeout)), connects_(connects)
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
        for (int member = connects ? size - 1 : -1; member >= 0; member--) {
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
        if (group_ && connects_) {
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

    // Put copies in common memory, which other processes can read and write, in the place of tensors. Under the lock.
    static void make_common(OpType type, Tensors &inputs, Tensors &outputs)
    {
        std::map<const void *, at::Tensor> copies; /* an input may be an output */
        for (Tensors *tensors : {&inputs, &outputs}) {
            for (at::Tensor &tensor : *tensors) {
                at::Tensor &copy = copies[tensor.unsafeGetTensorImpl()];
                copy = copy.defined() ? copy : copy_of(Work::ignores_strides(type) ? plain(tensor) : tensor);
                tensor = copy;
            }
        }
    }

    // A work that begins. If ranks are processes, inputs and outputs become common copies.
    c10::intrusive_ptr<Work> work_of(const Key &key, OpType type, Tensors &inputs, Tensors &outputs,
                                     Milliseconds timeout, int peer = -1)
    {
        const Milliseconds patience = timeout == c10d::kUnsetTimeout ? options_->timeout : timeout;
        const Tensors callers = outputs;
        if (fp_sim_is_forked() != 0) {
            make_common(type, inputs, outputs);
        }
        const auto work = c10::make_intrusive<Work>(all_, group_, rank_, key, type, outputs, patience, peer);
        work->own->outputs = callers;
        work->own->takes = fp_sim_is_forked() != 0 && type != OpType::SEND;
        if (group_->works.size() > 8 * group_->counts.size()) { /* drop finished works that no rank holds */
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

    c10::intrusive_ptr<c10d::Work> begin(OpType type, Tensors inputs, Tensors outputs, Milliseconds timeout,
                                         int root = 0, const c10d::ReduceOp &reduction = c10d::ReduceOp::SUM,
                                         const std::function<void()> &at_wait = {})
    {
        const OpType on_wire = type == OpType::REDUCE_SCATTER ? OpType::ALLREDUCE : type;
        pause();
        std::unique_lock held(all_->lock);
        expire(*group_);
        const Key key{group_->counts[static_cast<size_t>(rank_)]++, on_wire, root};
        const auto work = work_of(key, type, inputs, outputs, timeout);
        work->own->at_wait = at_wait;
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
        Tensors none, tensors{tensor};
        const auto work = work_of({0, type, 0}, type, none, tensors, c10d::kUnsetTimeout, other);
        const Message mine{tensors.front(), work};
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
    const bool connects_;
    std::shared_ptr<Group> group_;
};

} // namespace
