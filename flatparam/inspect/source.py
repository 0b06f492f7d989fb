"""The module that a factory makes, on the meta device."""

from __future__ import annotations

import importlib

import torch
from torch import nn


class BadInput(ValueError):
    """What the user asked for cannot be inspected; the message is one line."""


def one_line(error: BaseException) -> str:
    """The type and message of ``error``."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def load(spec: str) -> nn.Module:
    """Call ``package.module:factory`` under the meta device. Raises: BadInput."""
    where, colon, path = spec.partition(":")
    if not (where and colon and path):
        raise BadInput(f"expected package.module:factory, got {spec!r}")
    try:
        factory: object = importlib.import_module(where)
    except (Exception, SystemExit) as error:
        raise BadInput(f"cannot import {where}: {one_line(error)}") from error
    for name in path.split("."):
        try:
            factory = getattr(factory, name)
        except AttributeError as error:
            raise BadInput(f"{where} has no `{path}`") from error
    if isinstance(factory, nn.Module) or not callable(factory):
        raise BadInput(f"expected {spec} to be a function that makes a module, it is a {type(factory).__name__}")
    try:
        with torch.device("meta"):
            module = factory()
    except (Exception, SystemExit) as error:
        raise BadInput(f"{spec}() raised {one_line(error)}") from error
    if not isinstance(module, nn.Module):
        raise BadInput(f"expected {spec}() to return an nn.Module, it returned a {type(module).__name__}")
    _leave_data(module)
    return module


def _leave_data(module: nn.Module) -> None:
    """Put meta parameters in the place of those that the factory made elsewhere; shared ones stay shared."""
    found: dict[nn.Parameter, nn.Parameter] = {}
    for inner in module.modules():
        for name, param in inner._parameters.items():
            if type(param) is nn.Parameter and not param.is_meta:
                if param not in found:
                    found[param] = nn.Parameter(param.detach().to("meta"), param.requires_grad)
                inner._parameters[name] = found[param]
