"""Operations on parameters that are sharded, tried in processes that need not survive them: run as a script.

Prints a JSON object: model -> operation -> type and text of what it raised, or that the process died of it.
"""

import copy
import functools
import gc
import io
import json
import os
import pickle
import sys
import warnings

import numpy as np
import torch
import torch._dynamo  # which a backward imports: here once, and not in each of the processes
import torch.distributed as dist
import torch.nn.functional as F
from gloo import fake_world
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP

X = torch.ones(2, 4)


def x(w):
    return X.to(w.dtype)


OPERATIONS = {
    "w + 1": lambda w: w + 1,
    "x @ w": lambda w: x(w) @ w,
    "F.linear": lambda w: F.linear(x(w), w),
    "F.linear of a vector": lambda w: F.linear(x(w)[0], w),
    "F.conv1d": lambda w: F.conv1d(w.new_ones(1, 4, 4), w[:, :, None]),
    "F.embedding": lambda w: F.embedding(torch.tensor([1, 2]), w),
    "addmm": lambda w: torch.addmm(w.new_zeros(2, 4), x(w), w),
    "sum": lambda w: w.sum(),
    "norm": lambda w: w.norm(),
    "_foreach_norm": lambda w: torch._foreach_norm([w.detach()]),
    "item": lambda w: w[0, 0].item(),
    "tolist": lambda w: w.tolist(),
    "bool": lambda w: bool((w > 0).all()),
    "a row": lambda w: w[1] + 1,
    "clone": lambda w: w.clone(),
    "cat": lambda w: torch.cat([w, w]),
    "equal": lambda w: torch.equal(w, torch.zeros(4, 4)),
    "to another dtype": lambda w: w.to(torch.bfloat16),
    "to_sparse": lambda w: w.to_sparse(),
    "svd": lambda w: torch.linalg.svd(w.detach()),
    "torch.tensor": lambda w: torch.tensor(w.detach()),
    "repr": lambda w: repr(w),
    "fill_": lambda w: w.detach().fill_(1.0),
    "copy_": lambda w: w.detach().copy_(torch.zeros(4, 4)),
    "kaiming_uniform_": lambda w: nn.init.kaiming_uniform_(w.detach()),
    "numpy": lambda w: w.detach().numpy(),
    "np.asarray": lambda w: np.asarray(w.detach()),
    "np.from_dlpack": lambda w: np.from_dlpack(w.detach()),
    "is_shared": lambda w: w.is_shared(),
    "is_shared of the storage": lambda w: w.untyped_storage().is_shared(),
    "to_dlpack": lambda w: torch.utils.dlpack.to_dlpack(w.detach()),
    "data_ptr": lambda w: w.data_ptr(),
    "untyped_storage().data_ptr": lambda w: w.untyped_storage().data_ptr(),
    "untyped_storage().tolist": lambda w: w.untyped_storage().tolist(),
    "untyped_storage()[0]": lambda w: w.untyped_storage()[0],
    "bytes(untyped_storage())": lambda w: bytes(w.untyped_storage()),
    "set_": lambda w: w.new_empty(0).set_(w.detach()).sum(),
    "share_memory_": lambda w: w.detach().share_memory_(),
    "torch.save": lambda w: torch.save(w, io.BytesIO()),
    "torch.save of old": lambda w: torch.save(w.detach(), io.BytesIO(), _use_new_zipfile_serialization=False),
    "pickle": lambda w: pickle.dumps(w.detach()),
    "deepcopy": lambda w: copy.deepcopy(w.detach()),
    "a state dict of one's own": lambda w: torch.save({"w": w.detach()}, io.BytesIO()),
    "all_reduce": lambda w: dist.all_reduce(w.detach() + 0),
    "a gradient": lambda w: torch.autograd.grad((x(w) @ w).sum(), w),
    "parameters_to_vector": lambda w: nn.utils.parameters_to_vector([w]),
}


class Inner(nn.Linear):
    """Its weight is what is tried."""


def wrapped(**arguments):
    torch.manual_seed(0)
    return FSDP(nn.Sequential(FSDP(Inner(4, 4), **arguments), nn.Linear(4, 4)), **arguments)


def loaded(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    return model


def summoned(model):
    with FSDP.summon_full_params(model):
        pass
    return model


def evaluated(model):
    with torch.no_grad():
        model(X)
    return model


def trained(model):
    model(X).sum().backward()
    return model


MODELS = {
    "wrapped": wrapped,
    "frozen": lambda: frozen(wrapped()),
    "loaded": lambda: loaded(wrapped()),
    "summoned": lambda: summoned(wrapped()),
    "copied": lambda: copy.deepcopy(wrapped()),
    "pickled": lambda: pickle.loads(pickle.dumps(wrapped())),
    "in another dtype": lambda: wrapped().double(),
    "evaluated": lambda: evaluated(wrapped()),
    "trained": lambda: trained(wrapped()),
}


def frozen(model):
    return model.requires_grad_(False)


def weight_of(model):
    (inner,) = (module for module in model.modules() if isinstance(module, Inner))
    return inner.weight


def reset(model):
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def init_in_the_way_of_1_12(module):
    """Initialize all modules of a tree, in which units are already."""
    for inner in module.modules():
        if isinstance(inner, nn.Linear):
            inner.reset_parameters()


CALLS = {
    "reset_parameters over the tree": lambda: reset(wrapped()),
    "param_init_fn of 1.12": lambda: FSDP(
        nn.Sequential(FSDP(Inner(4, 4)), nn.Linear(4, 4, device="meta")), param_init_fn=init_in_the_way_of_1_12
    ),
    "a submodule outside of its unit": lambda: evaluated(wrapped()).module[1](X),
    "a loss over an attribute": lambda: weight_of(evaluated(wrapped())).square().sum().backward(),
}


def tried(calls):
    """What each of ``calls`` raised, in a process that makes one after the other, and in a new one when it has died."""
    results = {}
    while len(results) < len(calls):
        left = {name: call for name, call in calls.items() if name not in results}
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            for name, call in left.items():
                try:
                    text = f"nothing, returned {type(call()).__name__}"
                except BaseException as error:
                    text = f"{type(error).__name__}: {error}"
                os.write(writing, json.dumps([name, text]).encode() + b"\n")
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            results.update(json.loads(line) for line in pipe)
        status = os.waitpid(child, 0)[1]
        if status != 0:
            results[next(name for name in left if name not in results)] = f"died: {status}"
    return results


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = {}
    with fake_world(2):
        for name, make in MODELS.items():
            model = make()
            weight = weight_of(model)
            results[name] = tried({what: functools.partial(call, weight) for what, call in OPERATIONS.items()})
        del model
        weight = weight_of(evaluated(wrapped()))
        gc.collect()  # once for the model, and once for what it has changed in torch
        gc.collect()
        results["gone"] = tried({what: functools.partial(call, weight) for what, call in OPERATIONS.items()})
        ours, weight = torch.UntypedStorage.is_shared, None
        gc.collect()
        assert torch.UntypedStorage.is_shared is not ours
        results["calls"] = tried(CALLS)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
