"""Lightning's FSDPStrategy, of its Trainer and of Fabric, on flatparam's runtime, beside torch's class.

Lightning asks for a GPU where the strategy is of exactly this type, so the tests derive one. torch's own handle ends
the process when it saves on a CPU: what is saved is compared with torch's class on flatparam's handle.
"""

import importlib

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Block, data, loss_of, make
from gloo import note, run_ranks
from trainers import Wider, look_like_torchrun, needs, same, same_files, under

needs("lightning")

STEPS, SAVED = 6, 3
SETTINGS = (("32-true", "full"), ("bf16-mixed", "sharded"))


def a_strategy(module, **settings):
    """Lightning's of ``lightning.pytorch`` or ``lightning.fabric``, which may be on a CPU."""
    look_like_torchrun()
    strategies = importlib.import_module(f"lightning.{module}.strategies")
    return type("OnCPU", (strategies.FSDPStrategy,), {})(auto_wrap_policy={Block}, **settings)


def fit(folder, precision, saves, checkpoint=None, blocks=3, **settings):
    """The losses of the Trainer's steps by their number, and the weights at the end."""
    strategy = a_strategy("pytorch", **settings)
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Trained(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = make(cls=Wider, blocks=blocks), {}

        def training_step(self, batch, i):
            loss = loss_of(self.model, batch)
            self.losses[self.trainer.fit_loop.total_batch_idx] = loss.item()
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    module = Trained()
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        precision=precision,
        max_steps=STEPS,
        accumulate_grad_batches=2,
        callbacks=[saving] if saves else [],
        enable_checkpointing=saves,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    epoch = torch.utils.data.DataLoader([data(i) for i in range(2 * SAVED)], batch_size=None)
    trainer.fit(module, epoch, ckpt_path=checkpoint)
    root = trainer.strategy.model
    assert (
        sum(isinstance(unit, torch.distributed.fsdp.FullyShardedDataParallel) for unit in root.modules()) == blocks + 1
    )
    return module.losses, whole(root)


def whole(model):
    with torch.distributed.fsdp.FullyShardedDataParallel.summon_full_params(model, writeback=False):
        named = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in model.named_parameters()}
        return {name: value.detach().clone() for name, value in named.items()}


def alike_in_the_trainer(folder):
    for i, (precision, form) in enumerate(SETTINGS):
        runs = {}
        for kind in ("torch", "dropin", "runtime"):
            note(f"{precision} {form} {kind}")
            with under(kind):
                runs[kind] = fit(f"{folder}/{i}-{kind}", precision, kind != "torch", state_dict_type=form)
        dist.barrier()
        losses, _ = runs["torch"]
        assert len(losses) == 2 * STEPS
        same(runs["dropin"], runs["torch"])
        same(runs["runtime"], runs["torch"])
        if dist.get_rank() == 0:
            same_files(f"{folder}/{i}-runtime", f"{folder}/{i}-dropin")
        for saved_by in ("dropin", "runtime"):
            note(f"{precision} {form}: the runtime goes on from what {saved_by} has saved")
            with under("runtime"):
                checkpoint = f"{folder}/{i}-{saved_by}/step={SAVED}.ckpt"
                found, weights = fit(folder, precision, False, checkpoint, state_dict_type=form)
            assert found == {step: loss for step, loss in losses.items() if step >= 2 * SAVED}
            same(weights, runs["torch"][1])


@pytest.mark.multiprocess
def test_the_trainer_trains_saves_and_resumes_alike(tmp_path):
    run_ranks(alike_in_the_trainer, 2, str(tmp_path))


def with_fabric(folder, precision, saves, form, blocks=3):
    """The losses of steps with clipping and micro-batches, saved in the middle, and again from there, and weights."""
    strategy = a_strategy("fabric", state_dict_type=form)
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=precision)
    fabric.launch()
    model = make(cls=Wider, blocks=blocks)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    def step(i):
        losses = []
        for half in range(2):
            with fabric.no_backward_sync(model, enabled=half == 0):
                loss = loss_of(model, data(2 * i + half))
                fabric.backward(loss)
            losses.append(loss.item())
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        return (*losses, norm.item())

    first = [step(i) for i in range(SAVED)]
    if saves:
        fabric.save(folder, {"model": model, "optimizer": optimizer, "steps": SAVED})
    then = [step(i) for i in range(SAVED, STEPS)]
    if saves:
        state = {"model": model, "optimizer": optimizer, "steps": 0}
        fabric.load(folder, state)
        assert state["steps"] == SAVED
        assert [step(i) for i in range(SAVED, STEPS)] == then
    return first + then, whole(model._forward_module)


def alike_in_fabric(folder):
    for i, (precision, form) in enumerate(SETTINGS):
        runs = {}
        for kind in ("torch", "dropin", "runtime"):
            note(f"{precision} {form} {kind}")
            with under(kind):
                runs[kind] = with_fabric(f"{folder}/{i}-{kind}", precision, kind != "torch", form)
        dist.barrier()
        same(runs["dropin"], runs["torch"])
        same(runs["runtime"], runs["torch"])
        if dist.get_rank() == 0:
            same(*(torch.load(f"{folder}/{i}-{kind}", weights_only=True) for kind in ("runtime", "dropin"))) if (
                form == "full"
            ) else same_files(f"{folder}/{i}-runtime", f"{folder}/{i}-dropin")


@pytest.mark.multiprocess
def test_fabric_trains_saves_and_resumes_alike(tmp_path):
    run_ranks(alike_in_fabric, 2, str(tmp_path))
