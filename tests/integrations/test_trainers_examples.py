"""The examples for other libraries run on two gloo ranks, and print the last lines that their heads promise."""

import pytest
from scripts import check_help, check_last_lines, head_of, printed_on_ranks
from trainers import look_like_torchrun, needs, tell_accelerate_of_an_accelerator

needs("peft")
needs("bitsandbytes")
needs("lightning")


def as_torchrun():
    """Of this file, so that each rank calls ``needs``, which imports a torchvision that was built for CUDA."""
    look_like_torchrun()


def as_on_gpus():
    tell_accelerate_of_an_accelerator()


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("script", "prepare"),
    [("hf_trainer.py", as_on_gpus), ("lightning_fabric.py", as_torchrun), ("qlora.py", as_torchrun)],
)
def test_an_example_prints_the_last_lines_that_its_head_promises(script, prepare, tmp_path, capsys):
    check_help(script, capsys)
    printed = printed_on_ranks(script, 2, tmp_path, prepare=prepare)
    check_last_lines(printed, head_of(script).split("\n\n")[-1])
