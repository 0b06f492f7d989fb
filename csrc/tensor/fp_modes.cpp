// tensor/fp_modes.cpp -- see tensor/fp_modes.hpp
#include "tensor/fp_modes.hpp"

#include <torch/csrc/PyInterpreter.h>

#include <string_view>
#include <vector>

#include "tensor/fp_graph.h"
#include "tensor/fp_bridge.hpp"

namespace fp {
namespace {

using Modes = c10::impl::TorchDispatchModeTLS;
using Key = c10::impl::TorchDispatchModeKey;
using Mode = std::shared_ptr<c10::impl::PyObject_TorchDispatchMode>;

// Whether mode is a selective checkpoint's, of the first forward or of the recomputation: torch's names since 2.4.
bool
is_checkpoint(const Mode &mode)
{
    const std::string_view name = Py_TYPE(mode->ptr(getPyInterpreter()))->tp_name;
    return name == "_CachingTorchDispatchMode" || name == "_CachedTorchDispatchMode";
}

// The number of torch's modes for tracing, which lie below the others on the stack.
int64_t
count_tracing()
{
    int64_t count = 0;
    for (const Key key : {Key::FAKE, Key::PROXY, Key::FUNCTIONAL}) {
        count += Modes::get_mode(key).has_value();
    }
    return count;
}

} // namespace

HiddenCheckpoints::HiddenCheckpoints()
{
    const int64_t all = Modes::stack_len();
    if (all == 0) {
        return;
    }
    const int64_t tracing = count_tracing();
    std::vector<Mode> others;
    for (int64_t i = tracing; i < all; i++) {
        if (const Mode &mode = Modes::get_stack_at(i); !is_checkpoint(mode)) {
            others.push_back(mode);
        }
    }
    if (tracing + static_cast<int64_t>(others.size()) == all) {
        return;
    }
    before = Modes::get_state();
    while (Modes::stack_len() > tracing) { // nothing fails from here on
        Modes::pop_stack();
    }
    for (Mode &mode : others) {
        Modes::push_non_infra_mode_onto_stack(std::move(mode));
    }
}

HiddenCheckpoints::~HiddenCheckpoints()
{
    if (before) {
        Modes::set_state(*std::move(before));
    }
}

} // namespace fp

struct fp_hidden {
    fp::HiddenCheckpoints checkpoints;
};

extern "C" int
fp_hide_checkpoints(fp_hidden **hidden) noexcept
{
    *hidden = nullptr;
    return c10::impl::TorchDispatchModeTLS::stack_len() == 0 ? 0 : fp::guarded(-1, [&] {
        *hidden = new fp_hidden();
        return 0;
    });
}

extern "C" void
fp_show_checkpoints(fp_hidden *hidden) noexcept
{
    delete hidden;
}
