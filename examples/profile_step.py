"""Profile training steps: the host's time in each part of each unit, the collectives, and the bytes of a rank.

    torchrun --nproc-per-node 2 examples/profile_step.py

`pre_forward` and `pre_backward` gather a unit's parameters, `forward` is the module's own, `post_backward` reduces the
gradients. On GPUs the trace, for https://ui.perfetto.dev, shows the kernels beside them. The last lines:

    a step has 7 all-gathers and 4 reductions; parameters, gradients and AdamW's state take at most 1.26 MB
    trace: run/trace.json
"""

import argparse
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from flatparam import FullyShardedDataParallel, ModuleWrapPolicy

WIDTH, BLOCKS = 128, 3


class Block(nn.Module):
    """A feed-forward layer: one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.feed = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.feed(x)
        return out


def train(options: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 1)),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=device,
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(64, WIDTH, device=device)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()

    step()  # the first one makes buffers, and learns the order of the units
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=kinds) as profiler:
        for _ in range(options.steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    if dist.get_rank() != 0:
        return
    rows = profiler.key_averages()
    for row in sorted(rows, key=lambda row: row.self_cpu_time_total):
        if row.key.startswith("flatparam "):
            print(f"{row.key:<54}{row.self_cpu_time_total / options.steps / 1e3:>8.3f} ms")
    calls = {row.key: row.count // options.steps for row in rows if row.key.startswith("c10d::")}
    gathers = sum(count for name, count in calls.items() if "gather" in name)
    # two gloo ranks exchange the parts of a gradient, and add
    reductions = sum(count for name, count in calls.items() if "reduce" in name or "alltoall" in name)
    megabytes = model.memory_plan().peak_alone / 1e6
    print(
        f"a step has {gathers} all-gathers and {reductions} reductions; parameters, gradients and AdamW's state take "
        f"at most {megabytes:.2f} MB"
    )
    options.trace.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(options.trace))
    print(f"trace: {options.trace}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Profile training steps.")
    parser.add_argument("--steps", type=int, default=5, help="steps to profile")
    parser.add_argument("--trace", type=Path, default=Path("run/trace.json"), help="the file of the trace")
    options = parser.parse_args()
    if "RANK" not in os.environ:  # started without torchrun: this process is the only rank
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    train(options, device)
    gc.collect()  # deletes the model, which holds the process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
