"""Putting flatparam under programs that know torch's FullyShardedDataParallel only."""

from .dropin import install as handle
from .dropin.base import installed
from .fsdp.desync.liveness import watching_worlds
from .fsdp.wrapper import substitute as wrapper


def install(runtime: bool = False) -> None:
    """Let every FullyShardedDataParallel that is wrapped from now on be flatparam's, in part or as a whole.

    Works before or after ``torch.distributed.fsdp`` was imported, and any number of times. Models that are wrapped
    already go on as they are.

    Args:
        runtime: False: torch's class stays, with ``flatparam.FlatParamHandle`` under it. True: torch's names of the
            class mean ``flatparam.FullyShardedDataParallel``, in modules that have imported it already too; a name kept
            in a class, a list or a default of a function is not found. A warning names each imported trainer
            (accelerate, transformers, lightning, peft, trl) whose version was not tested, and the features that a
            tested one loses.
    Raises: RuntimeError without ``runtime``, when torch's handle has a name that flatparam's lacks, does something else
        on a tiny module, or was changed: nothing is installed.
    """
    watching_worlds.begin()
    if runtime:
        wrapper.installed.begin()
    else:
        handle.install()


def uninstall() -> None:
    """Undo ``install()`` and ``install(runtime=True)``: models wrapped from now on are torch's again."""
    installed.end()
    wrapper.installed.end()
    watching_worlds.end()


def is_installed(runtime: bool = False) -> bool:
    """Whether models wrapped now use ``flatparam.FlatParamHandle``; with ``runtime`` whether they are flatparam's."""
    return wrapper.is_installed() if runtime else handle.is_installed()
