"""A model's memory is freed with the last reference to it, at once, also after a refused call.

Promises:
- a wrapped model is freed so, whatever policy chose its units: `test_a_model_that_a_policy_has_wrapped_goes`
- a refused model, and the copies made for it, are freed with the last reference to the model
"""

import contextlib
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from fsdp_models import data, loss_of, make, wrap_blocks
from gloo import fake_world, run_ranks
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import flatparam
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.layer_zero import FlatParamHandle


@contextlib.contextmanager
def without_collections():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def load_other_names(model, optimizer, path):
    model.load_state_dict({"other": torch.ones(2)})


def load_other_shapes(model, optimizer, path):
    model.load_state_dict({name: torch.ones(17) for name in model.state_dict()})


def load_sharded(model, optimizer, path):
    with FSDP.state_dict_type(model, flatparam.StateDictType.SHARDED_STATE_DICT):
        model.load_state_dict({"other": torch.ones(2)})


def load_no_file(model, optimizer, path):
    flatparam.load_safetensors(model, path / "none.safetensors")


def load_no_checkpoint(model, optimizer, path):
    flatparam.checkpoint.load(path / "none", model, optimizer)


def save_into_a_file(model, optimizer, path):
    path.joinpath("file").write_text("")
    flatparam.checkpoint.save(path / "file" / "below", model, optimizer)


def save_an_optimizer_of_others(model, optimizer, path):
    FSDP.optim_state_dict(model, torch.optim.Adam([torch.ones(2, requires_grad=True)]))


def raise_in_forward(model, optimizer, path):
    model(torch.ones(3, 999))


def raise_in_backward(model, optimizer, path):
    next(model.children()).register_full_backward_hook(lambda *_: 1 / 0)
    loss_of(model, data(0)).backward()


def summon_twice(model, optimizer, path):
    with FSDP.summon_full_params(model), FSDP.summon_full_params(model):
        pass


def clip_by_no_number(model, optimizer, path):
    model.clip_grad_norm_("no number")


REFUSED = [
    *(load_other_names, load_other_shapes, load_sharded, load_no_file, load_no_checkpoint, save_into_a_file),
    *(save_an_optimizer_of_others, raise_in_forward, raise_in_backward, summon_twice, clip_by_no_number),
]


@pytest.mark.parametrize("call", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_was_refused_goes_with_its_model(call, tmp_path):
    with fake_world(1):
        for attempt in range(2):
            with without_collections():
                model = wrap_blocks(make())
                optimizer = torch.optim.Adam(model.parameters())
                loss_of(model, data(0)).backward()
                optimizer.step()
                gone = weakref.ref(model)
                with contextlib.suppress(Exception):
                    call(model, optimizer, tmp_path)
                    pytest.fail("nothing was refused")
                del model, optimizer
                assert gone() is None or attempt == 0  # what is imported at the first error keeps frames as garbage


def test_what_layer_zero_has_refused_goes_with_its_module():
    with fake_world(1) as group, without_collections():
        module = make()
        gone = weakref.ref(module)
        with pytest.raises(ValueError, match="mp_param_dtype"):
            FlatParamHandle(list(module.parameters()), module, torch.device("cpu"), "float", None, group, group)
        del module
        assert gone() is None


def policy_of_all(module, recurse, nonwrapped_numel):
    return recurse or isinstance(module, nn.Linear)


def policy_that_fails(module, recurse, nonwrapped_numel):
    raise ArithmeticError


POLICIES = [None, {nn.Linear}, ModuleWrapPolicy({nn.Linear}), policy_of_all, policy_that_fails]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_that_a_policy_has_wrapped_goes(policy, tied):
    with fake_world(2):
        for attempt in range(2):
            with without_collections():
                module = make()
                if tied:  # refused if a policy puts the two into different units
                    module.tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
                    module.tied[1].weight = module.tied[0].weight
                gone = [weakref.ref(each) for each in module.modules()]
                with contextlib.suppress(ValueError, ArithmeticError):
                    model = FSDP(module, auto_wrap_policy=policy)
                    gone += [weakref.ref(each) for each in model.modules()]
                    del model
                del module
                assert attempt == 0 or all(each() is None for each in gone)  # the first one imports Dynamo


def the_ranks_refuse():
    rank = dist.get_rank()
    for attempt in range(4):
        with without_collections():
            module = nn.Linear(3, 3 + rank * (attempt % 2))
            gone = weakref.ref(module)
            with pytest.raises((TypeError, ValueError)):
                FSDP(module, mixed_precision=3 if rank == 1 and attempt % 2 == 0 else None)
            del module
            assert gone() is None or attempt < 2  # as above


@pytest.mark.multiprocess
def test_a_module_that_the_ranks_refuse_goes():
    run_ranks(the_ranks_refuse, 2)
