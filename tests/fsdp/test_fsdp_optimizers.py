"""torch's optimizers over shards, beside the unsharded module and torch's class: each way in which they are written."""

import itertools

import pytest
import torch
from fsdp_models import Averaged, assert_same, data, full_params, loss_of, make, wrap_blocks
from gloo import note, run_ranks
from torch.distributed.fsdp import FullyShardedDataParallel as TorchsFSDP

BY_ELEMENT = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
WAYS = [(name, way) for way in ("foreach", "forloop", "fused") for name in (FUSED if way == "fused" else BY_ELEMENT)]
WHOLE = ("Adafactor", "Muon")  # of whole matrices: Muon takes no others


def built(name, way, params):
    settings = {"momentum": 0.9} if name == "SGD" else {}
    return getattr(torch.optim, name)(params, lr=0.01, **settings, **({} if way is None else way))


def optimizers(name, way, model):
    matrices = [param for param in model.parameters() if param.ndim == 2]
    if name not in WHOLE:
        return [built(name, way, model.parameters())]
    others = [param for param in model.parameters() if param.ndim != 2]
    return [built(name, way, matrices), torch.optim.SGD(others, lr=0.01)]


def check(name, way, uo):
    note(f"{name} {way} uo={uo}")
    whole = {"atomic": torch.Tensor.numel} if name in WHOLE else {}
    module, models = make(), [wrap_blocks(make(), use_orig_params=uo, **whole)]
    if name not in WHOLE:  # torch's class has no pieces of two dimensions
        models.append(wrap_blocks(make(), TorchsFSDP, use_orig_params=uo, device_id=torch.device("cpu")))
    model = models[0]
    steppers = [optimizers(name, way, m) for m in (module, *models)]
    for i in range(4):
        Averaged(module, 2).backward(lambda rank, i=i: [data(i, rank)])
        losses = [loss_of(m, data(i)) for m in models]
        assert torch.equal(losses[0], losses[-1]), (name, way, uo)
        for loss in losses:
            loss.backward()
        for optimizer in itertools.chain(*steppers):
            optimizer.step()
            optimizer.zero_grad()
    if way == {"fused": True}:  # whose rounding depends on where in a vector of the processor an element lies
        for key, value in full_params(model).items():
            torch.testing.assert_close(value, dict(module.named_parameters())[key], rtol=1e-5, atol=1e-6)
    else:
        assert_same(model, module, f"{name} {way} uo={uo}")
    for m in models:
        assert all(torch.equal(a, b) for a, b in zip(m.parameters(), model.parameters(), strict=True)), (name, way, uo)
    assert any(not torch.equal(a, b) for a, b in zip(module.parameters(), make().parameters(), strict=True))


def by_element():
    for (name, way), uo in itertools.product(WAYS, (False, True)):
        check(name, {"foreach": way == "foreach"} if way != "fused" else {"fused": True}, uo)
    for name in WHOLE:
        check(name, None, True)


@pytest.mark.multiprocess
def test_optimizers_step_shards_as_they_step_the_whole():
    run_ranks(by_element, 2)
