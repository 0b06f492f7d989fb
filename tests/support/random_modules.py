"""Random modules with the parameters that a layout can get wrong, and a plain picture of a handle to compare."""

import enum
import types

import torch
from recording import OURS, describe
from torch import nn
from torch.distributed.fsdp._flat_param import HandleShardingStrategy

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WORLD_SIZES = (1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 32, 63, 64)


class Case:
    """One random module and how to shard it; ``build`` makes the same module each time it is called."""

    def __init__(self, random, **fixed):
        self.seed = random.randrange(2**31)
        self.dtype = random.choice(DTYPES)
        self.use_orig_params = random.random() < 0.6
        self.world_size = random.choice(WORLD_SIZES)
        self.rank = random.randrange(self.world_size)
        self.strategy = random.choice(list(HandleShardingStrategy))
        self.param_dtype = random.choice((None, None, *DTYPES))
        self.reduce_dtype = random.choice((None, None, *DTYPES))
        self.keep_low_precision_grads = random.random() < 0.2
        self.requires_grad = random.random() < 0.85
        vars(self).update(fixed)
        paths = ("", "a", "b", "a.x", "b.y_z")
        self.parameters = [self._parameter(random, f"p{i}", paths) for i in range(random.randint(1, 9))]
        shared = random.choices(self.parameters, k=random.choice((0, 0, 1, 3)))
        self.shared = [(random.choice(paths), f"s{i}", p[0], p[1]) for i, p in enumerate(shared)]
        self.left_out = random.random() < 0.2  # the handle then gets only some of the module's parameters
        self.shuffled = random.random() < 0.3

    def _parameter(self, random, name, paths):
        n = random.randint
        kind = random.choice(
            ("1", "odd", "1-D", "2-D", "3-D", "channels_last", "1x1", "transposed", "permuted", "empty")
        )
        if kind == "empty" and random.random() < 0.8:
            kind = "1-D"
        shape, order = {
            "1": ((1,), None),
            "odd": ((2 * n(0, 9) + 1,), None),
            "1-D": ((n(1, 40),), None),
            "2-D": ((n(1, 9), n(1, 9)), None),
            "3-D": ((n(1, 4), n(1, 5), n(1, 3)), None),
            "channels_last": ((n(1, 4), n(1, 4), n(1, 3), n(1, 3)), (0, 2, 3, 1)),
            "1x1": ((n(1, 4), n(1, 4), 1, 1), (0, 2, 3, 1)),
            "transposed": ((n(1, 9), n(1, 9)), (1, 0)),
            "permuted": ((n(1, 4), n(1, 5), n(1, 3)), (2, 0, 1)),
            "empty": ((0,), None),
        }[kind]
        return random.choice(paths), name, shape, order, random.random() < 0.7 or not self.use_orig_params

    def build(self):
        """Return the module and the list of parameters that the handle is to flatten."""
        generator = torch.Generator().manual_seed(self.seed)
        root = nn.Module()
        for path in ("a", "b"):
            root.add_module(path, nn.Module())
        root.a.add_module("x", nn.Module())
        root.b.add_module("y_z", nn.Module())
        parameters = []
        for path, name, shape, order, requires_grad in self.parameters:
            value = torch.randn(shape, generator=generator).to(self.dtype)
            if order is not None:  # the same shape, laid out in memory in another order of the dimensions
                value = value.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])
            parameter = nn.Parameter(value, requires_grad=requires_grad and self.requires_grad)
            root.get_submodule(path).register_parameter(name, parameter)
            parameters.append(parameter)
        for path, name, original_path, original_name in self.shared:
            original = root.get_submodule(original_path).get_parameter(original_name)
            root.get_submodule(path).register_parameter(name, original)
        if self.left_out and len(parameters) > 1:
            parameters = parameters[::2]
        if self.shuffled:
            parameters = parameters[::-1]
        return root, parameters

    def handle(self, kind, group, module, parameters):
        return kind(
            parameters,
            module,
            torch.device("cpu"),
            self.strategy,
            False,
            self.param_dtype,
            self.reduce_dtype,
            self.keep_low_precision_grads,
            group,
            self.use_orig_params,
        )


def picture(value, names):
    """Turn any value into plain ones that can be compared; ``names`` has the name of each module by id."""
    if isinstance(value, torch.Tensor):
        return describe(value)
    if isinstance(value, nn.Module):
        return ("module", names[id(value)])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = tuple((field, picture(getattr(value, field), names)) for field in value._fields)
        return (type(value).__module__, type(value).__qualname__, items)
    if isinstance(value, (set, frozenset)):
        return (type(value).__name__, sorted(map(str, (picture(item, names) for item in value))))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [picture(item, names) for item in value])
    if isinstance(value, dict):
        return (type(value).__name__, [(key, picture(item, names)) for key, item in value.items()])
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return ("callable", value.__name__)
    if value is None or isinstance(value, (bool, int, str, torch.dtype, torch.device, enum.Enum)):
        return (type(value).__name__, str(value))
    return ("object", type(value).__name__)


def picture_of_handle(handle, module, names_of=None):
    """Return all that can be seen of a handle: its attributes, its flat parameter's, its module's, and its metadata.

    ``names_of``: the attributes to look at, those of another handle; by default all that this one has.
    """
    names = {id(m): name for name, m in module.named_modules()}
    flat = handle.flat_param
    own = sorted(vars(handle) if names_of is None else names_of)
    result = {f"handle.{name}": picture(getattr(handle, name, "absent"), names) for name in own}
    for name, value in vars(flat).items():
        if not name.startswith(OURS):
            result[f"flat_param.{name}"] = picture(value, names)
    result["flat_param"] = describe(flat)
    result["offsets"] = picture(handle._get_flat_param_offsets(), names)
    result["names"] = picture([list(handle.param_module_names()), list(handle.shared_param_module_names())], names)
    result["modules"] = picture(handle._get_modules(), names)
    result["is_sharded"] = handle.is_sharded(flat)
    result["uses_sharded_strategy"] = handle.uses_sharded_strategy
    result["mixed"] = (handle._uses_param_mixed_precision, handle._uses_reduce_mixed_precision)
    result["repr"] = repr(handle)
    if hasattr(flat, "_shard_param_infos"):
        result["shard_metadata"] = picture(handle.shard_metadata(), names)
        result["fqns_in_shard"] = picture(handle._fqns_in_shard, names)
    for name, submodule in module.named_modules():
        result[f"module {name}"] = picture(
            {key: v for key, v in vars(submodule).items() if key == "_parameters" or isinstance(v, torch.Tensor)}, names
        )
    return result


def difference(expected, got):
    """Return the entries in which two pictures differ, as text; empty where they are equal."""
    lines = []
    for key in sorted(set(expected) | set(got)):
        if expected.get(key, "absent") != got.get(key, "absent"):
            lines.append(f"{key}\n  torch: {expected.get(key, 'absent')}\n  ours:  {got.get(key, 'absent')}")
    return "\n".join(lines)
