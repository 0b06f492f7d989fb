"""Storages that a user has freed or resized, tried in processes that need not survive them: run as a script.

Prints a JSON object: model -> what is done -> type and text of what it raised, or that the process died of it.
"""

import copy
import functools
import json
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
from freed_operations import tried
from gloo import fake_world
from layer_zero_driver import State, drive, unshard
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchsFSDP

import flatparam
from flatparam import CPUOffload, ShardingStrategy
from flatparam import FullyShardedDataParallel as FSDP

WIDTH = 64
X = torch.ones(2, WIDTH)


class Net(nn.Module):
    """``hook`` is called with it in the middle of its forward."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("offset", torch.ones(WIDTH))
        self.hook = None

    def forward(self, x):
        x = self.first(x)
        if self.hook is not None:
            self.hook(self)
        return self.last(x) + self.offset


def wrapped(kind, orig):
    torch.manual_seed(0)
    if kind == "drop-in":
        flatparam.install()
        return TorchsFSDP(Net(), use_orig_params=orig, device_id=torch.device("cpu"))
    strategy, settings = kind, {}
    if kind == "offloaded":
        strategy, settings = "FULL_SHARD", {"cpu_offload": CPUOffload(offload_params=True)}
    if kind.startswith("LAYER_ZERO"):
        settings["process_group"] = (dist.group.WORLD, dist.group.WORLD)
    return FSDP(Net(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=orig, **settings)


def resize(tensor):
    tensor.untyped_storage().resize_(8)


def weight(model):
    """The first one of which this rank has elements, or the flat parameter."""
    return next(param for param in model.parameters() if param.numel() > WIDTH)


def loss(model):
    return model(X).sum()


def save(model, optimizer=None):
    with tempfile.TemporaryDirectory() as folder:
        flatparam.checkpoint.save(f"{folder}/saved", model, optimizer)


def resized_before(what):
    """What is done with a model that has run, whose shard has no memory."""

    def call(model):
        loss(model).backward()
        resize(weight(model))
        what(model)

    return call


def load(model):
    loss(model).backward()
    state = model.state_dict()
    resize(weight(model))
    model.load_state_dict(state)


def give_data(param):
    param.data = torch.zeros_like(param)
    resize(param)


def given_data(model):
    give_data(weight(model))
    loss(model)


def in_forward(change):
    def call(model):
        model.module.hook = change
        with torch.no_grad():
            loss(model)
        model.module.hook = None
        loss(model)

    return call


def give_weight(module):
    values = torch.zeros(WIDTH, WIDTH)
    module.first.weight.data = values
    resize(values)


def unit_gradient(model):
    model.module.hook = lambda module: module.first.weight.register_hook(resize)
    loss(model).backward()


def param_hook(model):
    weight(model).register_hook(resize)
    loss(model).backward()


def accumulated_hook(model):
    weight(model).register_post_accumulate_grad_hook(lambda param: resize(param.grad))
    loss(model).backward()
    loss(model).backward()


def kept(change, synced=True, reduced=False):
    """Between micro-batches of no_sync; ``reduced``: after a synced backward."""

    def call(model):
        if reduced:
            loss(model).backward()
        with model.no_sync():
            loss(model).backward()
        change(weight(model))
        if synced:
            loss(model).backward()
            return
        with model.no_sync():
            loss(model).backward()

    return call


def after_backward(what):
    def call(model):
        loss(model).backward()
        resize(weight(model).grad)
        what(model)

    return call


def scale_and_resize(param):
    param.grad.mul_(0.5)
    resize(param.grad)


def drop_and_resize(param):
    grad, param.grad = param.grad, None
    resize(grad)


def give_grad(param):
    param.grad = torch.ones_like(param)
    resize(param.grad)


def no_sync_backward(model):
    with model.no_sync():
        loss(model).backward()


def summoned(model, with_grads=False):
    with type(model).summon_full_params(model, with_grads=with_grads):
        pass


def of_an_optimizer(what):
    def call(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loss(model).backward()
        optimizer.step()
        resize(optimizer.state[weight(model)]["momentum_buffer"])
        what(model, optimizer)

    return call


def buffer_saved(model):
    resize(model.module.offset)
    save(model)


def buffer_loaded(model):
    state = model.state_dict()
    resize(model.module.offset)
    model.load_state_dict({**state, "offset": torch.ones(WIDTH)})


BOTH = {
    "shard, forward": resized_before(loss),
    "shard, state dict": resized_before(lambda model: model.state_dict()),
    "shard, summoned": resized_before(summoned),
    "shard, copied": resized_before(copy.deepcopy),
    "data given, forward": given_data,
    "gradient in a hook": unit_gradient,
    "kept, synced": kept(lambda param: resize(param.grad)),
    "kept, not synced": kept(lambda param: resize(param.grad), synced=False),
    "kept and scaled": kept(scale_and_resize),
    "kept after a reduced one": kept(lambda param: resize(param.grad), reduced=True),
    "reduced, backward": after_backward(lambda model: loss(model).backward()),
}
OURS = {
    "shard, loaded into": load,
    "shard, another dtype": resized_before(lambda model: model.double()),
    "shard, moved": resized_before(lambda model: model._handle.flat_param_to("cpu")),
    "shard, saved": resized_before(save),
    "weight given in forward": in_forward(give_weight),
    "gradient in a hook of a parameter": param_hook,
    "gradient in a hook after it": accumulated_hook,
    "kept, dropped": kept(drop_and_resize),
    "own gradient after no_sync": kept(give_grad),
    "reduced, backward in no_sync": after_backward(no_sync_backward),
    "reduced, summoned": after_backward(lambda model: summoned(model, with_grads=True)),
    "reduced, another dtype": after_backward(lambda model: model.double()),
    "reduced, clipped": after_backward(lambda model: model.clip_grad_norm_(1.0)),
    "optimizer state": of_an_optimizer(lambda model, optimizer: FSDP.optim_state_dict(model, optimizer)),
    "optimizer state, saved": of_an_optimizer(save),
    "buffer, saved": buffer_saved,
    "buffer, loaded": buffer_loaded,
}


def by_hand(what, change, offload=False):
    """A handle of LayerZero's: ``change`` is done to .grad after a step, or (``what``) between its micro-batches."""
    net = Net()
    driver = drive(net, 1, None, offload, [net])
    (handle,) = driver.handles
    if what == "kept":
        driver.sync = False
        net(X).sum().backward()
        handle.reshard(True)
        handle._training_state = State.IDLE
    else:
        driver.backward([lambda: net(X).sum()])
    change(weight(net))
    if what == "shown":
        unshard(handle, State.SUMMON_FULL_PARAMS)
        handle.unshard_grad()
    driver.backward([lambda: net(X).sum()])


def resize_grad(param):
    resize(param.grad)


BY_HAND = {
    "shard": ("reduced", resize),
    "data given": ("reduced", give_data),
    "reduced, backward": ("reduced", resize_grad),
    "reduced, gathered": ("shown", resize_grad),
    "own gradient": ("reduced", give_grad),
    "kept": ("kept", resize_grad),
    "kept and scaled": ("kept", scale_and_resize),
}
KINDS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "LAYER_ZERO", "LAYER_ZERO_NESTED", "offloaded", "drop-in")


def run(kind, orig, call):
    return call(wrapped(kind, orig))


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = {}
    with fake_world(2):
        for kind in KINDS:
            for orig in (False, True):
                calls = BOTH if kind == "drop-in" else {**BOTH, **OURS}
                cases = {what: functools.partial(run, kind, orig, call) for what, call in calls.items()}
                results[f"{kind} {'orig' if orig else 'flat'}"] = tried(cases)
        for offload in (False, True):
            cases = {what: functools.partial(by_hand, *how, offload) for what, how in BY_HAND.items()}
            results[f"by hand {'offloaded' if offload else ''}"] = tried(cases)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
