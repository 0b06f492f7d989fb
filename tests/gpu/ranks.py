"""``torchrun --nproc-per-node=N tests/gpu/ranks.py [BODY...]``: the bodies on N GPUs or fewer; by itself: on one."""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "gpu"), str(TESTS / "support"), str(TESTS.parent)]
os.environ.setdefault("FLATPARAM_TEST_DEVICE", "cuda")

import accelerator  # noqa: E402
import bodies  # noqa: E402
import torch.distributed as dist  # noqa: E402


def main(names):
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    library = accelerator.build()
    for body in bodies.BODIES:
        if (not names or body.__name__ in names) and bodies.runs(body, dist.get_world_size()):
            body(library)
            print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {body.__name__} passed", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
