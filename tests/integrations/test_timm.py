"""timm's models, a transformer and one with batch norms, on flatparam's runtime and on torch's class."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from gloo import note, run_ranks
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from trainers import needs, same, under

import flatparam

needs("timm")

MODELS = {
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 2},
    "resnet10t": {},
}


def trained(kind, name, low, steps=3, **settings):
    """The losses of steps, the scores of an evaluation, and the state: torch's handle gives none on a CPU, it dies."""
    import timm
    from timm.models.resnet import BasicBlock
    from timm.models.vision_transformer import Block

    torch.manual_seed(0)
    module = timm.create_model(name, num_classes=5, **{**MODELS[name], **settings})
    with under(kind):
        model = fsdp.FullyShardedDataParallel(
            module,
            auto_wrap_policy=ModuleWrapPolicy({Block, BasicBlock}),
            mixed_precision=fsdp.MixedPrecision(torch.bfloat16, torch.float32) if low else None,
            use_orig_params=True,
        )
        assert isinstance(model, flatparam.FullyShardedDataParallel) == (kind == "runtime")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
        generator = torch.Generator().manual_seed(dist.get_rank())
        losses = []
        for _ in range(steps):
            images = torch.randn(4, 3, 32, 32, generator=generator)
            loss = torch.nn.functional.cross_entropy(model(images).float(), torch.arange(4) % 5)
            loss.backward()
            losses += [loss.item(), model.clip_grad_norm_(1.0).item()]
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            scores = model(images)
        state = (
            model.state_dict() if kind != "torch" else None
        )  # torch's handle ends the process when it saves on a CPU
        return losses, scores, state


def alike():
    for name in MODELS:
        for low in (False, True):
            note(f"{name} low={low}")
            results = {kind: trained(kind, name, low) for kind in ("torch", "dropin", "runtime")}
            same(results["runtime"], results["dropin"])
            same(results["runtime"][:2], results["torch"][:2])
            assert list(results["runtime"][2]) == list(results["dropin"][2])


@pytest.mark.multiprocess
def test_timm_models_train_alike():
    run_ranks(alike, 2)
