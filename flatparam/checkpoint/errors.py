"""Words of errors: a block that adds the checkpoint's path to a CheckpointError; names that do not fit."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from ..fsdp.errors import CheckpointError, ModelTypeError
from ..fsdp.names import listed, printable

__all__ = ["CheckpointError", "check_model", "names_that_differ", "naming_checkpoint"]


def check_model(model: Any, what: str) -> None:
    """Raises: ModelTypeError that says what came, unless ``model`` is a module. ``what``: the function of the call."""
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        came = "None" if model is None else kind
        raise ModelTypeError(f"{what}: expected the model to be a torch.nn.Module, got {came}")


@contextmanager
def naming_checkpoint(path: Path) -> Iterator[None]:
    """Put ``path`` into the message of a CheckpointError of the block, unless it is there already."""
    try:
        yield
    except CheckpointError as error:
        if printable(str(path)) in str(error):
            raise
        raise CheckpointError(f"{path}: {error}") from error


def names_that_differ(missing: list[str], unexpected: list[str], kinds: tuple[str, str], quote: str = "`") -> str:
    """Return names that only a model or only its files have, and the way on, for an error; empty if there are none.

    ``missing``: those of the model; ``unexpected``: those of the files; ``kinds``: the words before each of the two.
    """
    found = [
        f"{kind}: {_grouped(names, quote)}" for kind, names in zip(kinds, (missing, unexpected), strict=True) if names
    ]
    if not found:
        return ""
    if prefix := _prefix_of(unexpected, missing):
        path = prefix.removesuffix(".")
        way_on = f"The names in the files begin with `{prefix}`, those of the model do not"
        if "." not in path:
            way_on += f': load into `nn.ModuleDict({{"{path}": model}})`'
    elif prefix := _prefix_of(missing, unexpected):
        way_on = f"The names of the model begin with `{prefix}`, those in the files do not"
        way_on += f': load into `model.get_submodule("{prefix.removesuffix(".")}")`'
    else:
        way_on = "Build the model as it was saved, or pass strict=False to load the names that both have"
    return f"{'; '.join(found)}. {way_on}"


def _grouped(names: list[str], quote: str) -> str:
    """Return the first names, at most 8; of more the first name and the number of those with each first part."""
    if len(names) <= 8:
        return ", ".join(f"{quote}{name}{quote}" for name in names)
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition(".")[0], []).append(name)
    told = [
        f"{quote}{first}{quote}" + (f" and {len(more)} more that begin with {quote}{part}.{quote}" if more else "")
        for part, (first, *more) in groups.items()
    ]
    return f"{len(names)} names, {', '.join(listed(told))}"


def _prefix_of(longer: list[str], shorter: list[str]) -> str:
    """Return the prefix with which all names of ``shorter`` are in ``longer``; empty if there is none."""
    there = set(longer)
    found = (name.removesuffix(short) for short in shorter[:1] for name in longer if name.endswith(f".{short}"))
    return next((prefix for prefix in found if all(prefix + short in there for short in shorter)), "")
