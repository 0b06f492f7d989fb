"""Random training programs: a seed gives a program, a dict of plain values that lists each decision.

| key | value |
|---|---|
| `width`, `tied` | width of the model; whether the embedding is the output's weight, too |
| `layers` | a dict each: `name`, `kind` (of `KINDS`), `unit`, `how` (of `HOW`), `frozen`, `double` |
| `phases` | a dict each: `size` and settings of the wrapper (`DEFAULTS`), the optimizer, `ops` |
| `faults` | of every second seed: what strikes in the last phase, see faults.py; a dict each |
| `host`, `machines` | the rank whose process has the store, or None; whether each rank has a machine of its own |
| `catches` | whether ranks catch what their user code raises, alone, and go on with the next op, at once or later |
| `device`, `on_host` | which streams of a simulated device are late, or None; whether its groups have gloo, too |

Each eighth program has `elastic`, too, and one phase: see random_elastic.py. Each sixteenth has `device` and one phase.

Odd seeds that 5 does not divide have the programs that they had before ``_add`` was written.

A phase after the first one goes on from the checkpoint of the phase before, in a new world. An op is a list:

| op | does |
|---|---|
| `backward, key, synced` | a forward and a backward on the batch `key` of each rank, in `no_sync` unless `synced` |
| `twice, key, synced` | the same, with two backwards over one graph |
| `losses, key, synced` | the same, with the backward of another loss in place of the second one |
| `overflow, where` | puts an infinity into one element of a gradient: ``where``, from 0 to 1, of all parameters |
| `step, which` | clips, steps all optimizers, or the one with the number ``which``, and clears their gradients |
| `clear` | clears gradients without a step |
| `evaluate, key` | a forward in `eval()` without gradients |
| `raise, key, layer, where` | a forward or a backward in which `layer` raises on all ranks; clears gradients |
| `summon, name` | writes to the parameter in `summon_full_params` |
| `freeze, layer, frozen` | freezes or unfreezes the parameters of `layer` |
| `average, key` | a forward in `eval()` with averaged weights |
| `other, key` | a step of the optimizer of another module, which has no unit |
"""

import dataclasses
import random

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flatparam import optim

from . import faults
from .faulty_programs import CallsUserCode

TOKENS, ROWS, LENGTH = 7, 2, 3
DISK_POINTS = 40
CATCHES = 0.15  # of the programs that faults strike
LONG = 100.0  # seconds after which a rank goes on that has caught an exception: longer than the time-out
AT_ONE_MOMENT = 0.5  # of those with two faults of one place
ELASTIC_KINDS = ["is killed", "is killed", "is stopped", "is late"]
HARMS = [
    "copy changes",
    "parity changes",
    "parity is made of changed bytes",
    "copy is of the step before",
    "parity is of the step before",
]
PLAIN = {"faults": [], "host": None, "machines": False, "catches": False, "device": None, "on_host": False}
HOW = ("call", "call", "call", "call", "twice", "unused", "checkpoint", "reentrant")
STRATEGIES = (
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "NO_SHARD",
    "ZERO_1",
    "HYBRID_SHARD",
    "_HYBRID_SHARD_ZERO2",
    "LAYER_ZERO",
    "LAYER_ZERO_NESTED",
)
GRIDS = STRATEGIES[4:]
BACKWARDS = ("backward", "twice", "losses")
PRECISIONS = {
    "fp32": (None, None),
    "bf16": (torch.bfloat16, None),
    "bf16, reduced in fp32": (torch.bfloat16, torch.float32),
    "fp32, reduced in bf16": (None, torch.bfloat16),
}
DEFAULTS = {
    "strategy": "FULL_SHARD",
    "inner": 1,
    "orig": False,
    "segments": True,
    "atomic": None,
    "alignment": None,
    "prefetch": None,
    "forward_prefetch": False,
    "min_unit_bytes": 0,
    "precision": "fp32",
    "optimizer": "SGD",
    "clip": None,
    "set_to_none": True,
    "kind": "ours",
    "reduction": None,
    "buffers": None,
    "scaler": None,
    "average": None,
}
ORDERED = ("FULL_SHARD", "SHARD_GRAD_OP", "ZERO_1", "LAYER_ZERO")
SCALE, GROWTH_INTERVAL = 8.0, 2
DECAY = 0.75  # of averaged weights: products with it, and with 1 minus it, are exact in kernels of any kind


class Block(nn.Module):
    """Odd sizes, one layer without bias: padding and empty shards occur."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, 2 * width + 1)
        self.outer = nn.Linear(2 * width + 1, width, bias=False)
        self.scale = nn.Parameter(torch.full((width,), 1.5))

    def forward(self, x, route):
        return self.scale * self.outer(torch.tanh(self.inner(x)))


class Plain(nn.Linear):
    def __init__(self, width):
        super().__init__(width, width)

    def forward(self, x, route):
        return torch.tanh(super().forward(x))


class Experts(nn.Module):
    """Three experts; each batch comes to one of them, so others get no gradient."""

    def __init__(self, width):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x, route):
        return self.experts[route % 3](x)


class EncoderDecoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.encoder, self.decoder = Plain(width), Plain(width)
        self.joins = nn.Linear(2 * width, width)

    def forward(self, x, route):
        memory = self.encoder(x, route)
        return self.joins(torch.cat([self.decoder(x, route), memory], -1))


class Recurrent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x, route):
        return self.lstm(x)[0]


class Convolution(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.convolution = nn.Conv1d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x, route):
        return self.norm(self.convolution(x.transpose(1, 2))).transpose(1, 2)


class WeightNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))

    def forward(self, x, route):
        return self.linear(x)


class Listed(nn.Module):
    """A list of parameters, among them one without dimensions and one without elements."""

    def __init__(self, width):
        super().__init__()
        shapes = ((width,), (), (0,), (1,), (width, width))
        self.listed = nn.ParameterList(nn.Parameter(torch.randn(shape) / 2) for shape in shapes)

    def forward(self, x, route):
        vector, scalar, empty, one, matrix = self.listed
        return (x @ matrix) * vector + scalar * one + empty.sum()


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.heads = nn.Linear(width, 3 * width)

    def forward(self, x, route):
        q, k, v = self.heads(self.norm(x)).chunk(3, -1)
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


class Buffered(nn.Module):
    """A mean that moves in training, and changes the output; a number that is no floating-point one."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mean", torch.full((width,), 0.3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x, route):
        y = self.linear(x) + self.mean.to(x.dtype)
        if self.training:
            self.calls.add_(1)
            self.mean.mul_(0.5).add_(0.5 * y.detach().mean((0, 1)))
        return y * (1 + self.calls % 2)


KINDS = {
    "block": Block,
    "plain": Plain,
    "experts": Experts,
    "encoder-decoder": EncoderDecoder,
    "lstm": Recurrent,
    "convolution": Convolution,
    "weight norm": WeightNorm,
    "listed": Listed,
    "attention": Attention,
}
YOUNGER_KINDS = {"buffered": Buffered}  # old seeds have theirs of KINDS
OPTIMIZERS = {  # on a device, too, with the loop that is torch's default on the host: kernels for lists round otherwise
    "SGD": lambda params: torch.optim.SGD(params, lr=0.03125, foreach=False),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.03125, momentum=0.5, foreach=False),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.0078125, foreach=False),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.0078125, foreach=False),
}
YOUNGER_OPTIMIZERS = {  # kernels that round the last elements of a tensor otherwise, but no products with powers of 2
    "fused SGD": lambda params: optim.SGD(params, lr=0.03125),
    "fused momentum": lambda params: optim.SGD(params, lr=0.03125, momentum=0.5),
}
OTHERS = {  # what may take the place of an optimizer; "A + B": B has the parameters of the first unit
    "SGD": ["fused SGD", "SGD + SGD", "fused SGD + SGD"],
    "momentum": ["fused momentum", "momentum + SGD", "fused SGD + momentum"],
    "Adam": ["AdamW + momentum", "fused momentum + Adam"],
    "AdamW": ["AdamW + SGD", "SGD + AdamW", "AdamW + fused momentum"],
}


class RaisedOnAllRanks(Exception):
    pass


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise RaisedOnAllRanks


class Layer(nn.Module):
    """A module of ``KINDS``. ``raises``: None, "forward" or "backward"."""

    def __init__(self, decisions, width):
        super().__init__()
        self.inside = (KINDS | YOUNGER_KINDS)[decisions["kind"]](width)
        self.dtype = torch.float64 if decisions["double"] else None
        if self.dtype:
            self.to(self.dtype)
        self.requires_grad_(not decisions["frozen"])
        self.raises = None

    def forward(self, x, route):
        faults.user_code()
        y = self.inside(x if self.dtype is None else x.to(self.dtype), route).to(x.dtype)
        if self.raises == "forward":
            raise RaisedOnAllRanks
        return _Raise.apply(y) if self.raises == "backward" else CallsUserCode.apply(y)


class Model(nn.Module):
    def __init__(self, program):
        super().__init__()
        width = program["width"]
        self.embedding = nn.Embedding(TOKENS, width)
        self.layers = nn.ModuleDict({each["name"]: Layer(each, width) for each in program["layers"]})
        self.head = nn.Linear(width, TOKENS, bias=False)
        if program["tied"]:
            self.head.weight = self.embedding.weight
        self.how = {each["name"]: each["how"] for each in program["layers"]}

    def forward(self, tokens, route):
        x = self.embedding(tokens)
        for name, layer in self.layers.items():
            how = self.how[name]
            if how == "unused":
                layer(x, route)
            elif how in ("checkpoint", "reentrant") and torch.is_grad_enabled():
                x = x + checkpoint(layer, x, route, use_reentrant=how == "reentrant")
            else:
                x = x + layer(x, route)
                x = x + layer(x, route) if how == "twice" else x
        return self.head(x)


def is_valid(program):
    """Whether faults strike ranks that are there, nothing unreduced is stepped or saved, and each rounding is known."""
    size = program["phases"][-1]["size"]
    if any(each["rank"] >= size + len(_joins(program)) for each in program["faults"]):
        return False
    if "elastic" in program and (size < 2 or any(slot >= size for slot, _ in _joins(program))):
        return False
    for phase in program["phases"]:
        phase = DEFAULTS | phase
        if phase["precision"] != "fp32" and phase["size"] == 1:
            return False
        if "+" in phase["optimizer"] and not any(each["unit"] for each in program["layers"]):
            return False
        if phase["reduction"] and phase["strategy"] not in ORDERED:
            return False
        reduced = True
        for op in [*phase["ops"], ["step"]]:
            if op[0] in BACKWARDS:
                reduced = op[2]
                if phase["reduction"] and not reduced:
                    return False
            elif op[0] in ("clear", "raise"):
                reduced = True
            if not reduced and (op[0] == "step" or not _may_accumulate(program["layers"], phase)):
                return False
    return True


def _joins(program):
    return program.get("elastic", {"joins": []})["joins"]


def _may_accumulate(layers, phase):
    """False: what ``no_sync`` keeps of some unit may be reduced apart from the last micro-batch, with other roundings.

    It is so for units with a copy of their shards in reentrant checkpoints: the outer graph has no node of theirs.
    """
    has_copy = phase["strategy"] == "ZERO_1" or phase["strategy"].startswith("LAYER_ZERO")
    return not has_copy or not any(each["unit"] and each["how"] == "reentrant" for each in layers)


def build(program):
    """The unsharded model; the same one in each call. To be called outside of ranks: torch has one generator."""
    torch.manual_seed(program["seed"])
    return Model(program)


def batch(key, rank):
    generator = torch.Generator().manual_seed(1000 * key + rank)
    return torch.randint(TOKENS, (ROWS, LENGTH), generator=generator), (key * 5 + rank * (key % 2)) % 3


def loss_of(output):
    return output.square().mean()


def losses_of(op, output):
    """Return the losses of one output, each for a backward, of an op of ``BACKWARDS``."""
    loss = loss_of(output)
    return {"backward": [loss], "twice": [loss] * 2}[op] if op != "losses" else [loss, output[:, 0].sin().sum()]


def optimizers_of(kinds, program, module):
    """The optimizers ``kinds`` of ``module``, wrapped or not: see ``OTHERS``."""
    makes = OPTIMIZERS | YOUNGER_OPTIMIZERS
    first, *second = kinds.split(" + ")
    if not second:
        return [makes[first](module.parameters())]
    unit = next(each["name"] for each in program["layers"] if each["unit"])
    groups = [], []
    for name, param in module.named_parameters():
        groups[f"layers.{unit}." in name].append(param)
    return [makes[kind](group) for kind, group in zip((first, *second), groups, strict=True)]


def draw(seed, kind=""):
    """Return the program of ``seed``.

    ``kind``: "elastic": one of flatparam.elastic, as each eighth seed has; "device": one for simulated devices, as each
    sixteenth seed has; "elastic device": both; another text: one of training on the host, for each seed.
    """
    if kind == "elastic device":
        return _elastic_on_device(seed)
    if kind == "elastic" or (not kind and seed % 8 == 7):
        return _elastic(seed)
    if kind == "device" or (not kind and seed % 16 == 6):
        return _on_device(seed)
    source = random.Random(seed)
    program, low = _begun(source, seed)
    layers = program["layers"]
    optimizer = source.choice(["SGD"] if _has_unused(layers) else list(OPTIMIZERS))
    program["phases"] = [
        _phase(source, program, low, optimizer, 10 * i) for i in range(source.choice([1, 1, 1, 2, 2, 3]))
    ]
    program |= PLAIN
    if seed % 2:
        _strike(source, program)
    if seed % 2 == 0 or seed % 5 == 0:
        _add(random.Random(f"more of {seed}"), program)
    return program


def _begun(source, seed, may_be_low=True):
    """Return a program without phases, and whether it computes in a low precision."""
    layers = [_layer(source, f"l{i}") for i in range(source.randint(1, 4))]
    program = {"seed": seed, "width": source.randint(2, 5), "tied": source.random() < 0.3, "layers": layers}
    low = source.random() < 0.3 and may_be_low
    if low:  # in bf16 a kernel may round otherwise for another alignment
        for layer in layers:
            layer["double"] = False
            if layer["how"] in ("twice", "reentrant"):
                layer["how"] = "call"
            if layer["kind"] not in ("block", "plain", "experts", "encoder-decoder", "attention"):
                layer["kind"] = "block"
    return program, low


def _elastic(seed):
    """Return a program of flatparam.elastic: ranks are lost, stopped or late, raise, have spoilt copies, and join."""
    source = random.Random(f"elastic {seed}")
    program, _ = _begun(source, seed, False)
    for layer in program["layers"]:
        layer["kind"] = "block" if layer["kind"] == "weight norm" else layer["kind"]  # elastic.start refuses it
    optimizer = source.choice(["SGD"] if _has_unused(program["layers"]) else list(OPTIMIZERS))
    phase = _phase(source, program, False, optimizer, 0)
    size, steps = source.choice([2, 3, 3, 4, 4, 5]), source.randint(3, 7)
    phase |= {"size": size, "inner": size, "strategy": source.choice(STRATEGIES[:4]), "kind": "ours"}
    ops = [op for i in range(steps) for op in _ops_of_step(source, program, phase, 10 * i)]
    phase["ops"] = [op for op in ops if op[0] not in ("freeze", "summon", "other")]
    joins = [[source.randrange(size), source.choice([0.0, 0.1, 1.0])] for _ in range(source.choice([0, 0, 1, 2, 3]))]
    number = source.choice([1, 1, 2, 2, 3])
    kinds = source.choice([ELASTIC_KINDS, ["is killed"]])
    drawn = faults.draw(seed, size + len(joins), number, (60 * steps, 1), kinds)
    if source.random() < 0.1:
        drawn = faults.draw(seed, size, 1, (1, 4 * steps), ["raises in user code"])
    for i in range(1, len(drawn)):
        if source.random() < AT_ONE_MOMENT:  # in the recovery, or near it
            drawn[i] = dataclasses.replace(drawn[i], point=drawn[0].point + source.randrange(60))
    for i, fault in enumerate(drawn):  # a new process begins where the one of its slot was killed
        if fault.rank < size and joins and source.random() < 0.7:
            joins[i % len(joins)][0] = fault.rank
    harms = [[source.randrange(1, steps), source.randrange(size), source.choice(HARMS)] for _ in range(2)]
    program["phases"] = [phase]
    program["elastic"] = {
        "redundancy": source.choice(["parity", "buddy"]),
        "every": source.choice([1, 1, 2, 3]),
        "joins": joins,
        "harms": harms[: source.choice([0, 0, 0, 1, 2])],
    }
    struck = {"faults": [dataclasses.asdict(each) for each in drawn], "machines": source.random() < 0.2}
    younger = random.Random(f"elastic grid {seed}")  # other seeds keep their programs
    if younger.random() < 0.25 and phase["strategy"] != "NO_SHARD":
        phase |= {"strategy": younger.choice(GRIDS), "inner": younger.choice(_divisors(size))}
        if not _may_accumulate(program["layers"], phase):
            phase["ops"] = [[*op[:2], True] if op[0] in BACKWARDS else op for op in phase["ops"]]
    return program | PLAIN | struck


def _elastic_on_device(seed):
    """Return the program of ``_elastic`` with devices, without what torch lacks for them: see ``_on_device``."""
    source, program = random.Random(f"elastic device {seed}"), _elastic(seed)
    _leave_out_what_devices_lack(program)
    [phase] = program["phases"]
    if _adam_rounds_otherwise(program):
        phase["optimizer"] = "SGD"
    return program | {"device": source.choice(["others", "computing"])}


def _on_device(seed):
    """Return a program for ranks with devices, for which torch has no convolution, LSTM, scaler or fused optimizer."""
    source = random.Random(f"device {seed}")
    program, low = _begun(source, seed)
    _leave_out_what_devices_lack(program)
    only_sgd = _adam_rounds_otherwise(program) or _has_unused(program["layers"])
    optimizer = source.choice(["SGD"] if only_sgd else list(OPTIMIZERS))
    program["phases"] = [_phase(source, program, low, optimizer, 0)]
    program |= PLAIN | {"device": source.choice(["others", "computing"]), "on_host": source.random() < 0.5}
    if source.random() < 0.5:
        _strike(source, program)
        if program["host"] != 0:  # the store must stay until the save has ended, if the fault does not strike
            program["host"] = None
    return program


def _leave_out_what_devices_lack(program):
    for layer in program["layers"]:
        layer["kind"] = "block" if layer["kind"] in ("convolution", "lstm") else layer["kind"]


def _adam_rounds_otherwise(program):
    """Whether a parameter is a scalar, for which kernels of devices and of the host round otherwise."""
    return any(layer["kind"] == "listed" for layer in program["layers"])


def _add(source, program):
    """Add choices that are younger than the others, from a generator of their own: other seeds keep their programs."""
    layers, phases = program["layers"], program["phases"]
    if source.random() < 0.25:
        source.choice(layers)["kind"] = "buffered"
    kinds = {each["kind"] for each in layers}
    optimizer = phases[0]["optimizer"]
    if source.random() < 0.5:
        may_be = [each for each in OTHERS[optimizer] if "+" not in each or any(layer["unit"] for layer in layers)]
        optimizer = source.choice(may_be or [optimizer])
    freezes = any(op[0] == "freeze" for phase in phases for op in phase["ops"])
    may_have_no_gradient = freezes or any(each["how"] == "unused" or each["frozen"] for each in layers)
    for phase in phases:
        phase |= {
            "optimizer": optimizer,
            "reduction": "ordered" if phase["strategy"] in ORDERED and source.random() < 0.4 else None,
            "buffers": "bfloat16" if "convolution" not in kinds and source.random() < 0.3 else None,
            "scaler": source.choice([None, None, "GradScaler", "ShardedGradScaler"]),
            "average": source.choice([None, None, None, "lerp", "AveragedModel"]),
        }
        if "+" in optimizer and may_have_no_gradient and _keeps_whole(phase):
            phase["scaler"] = None  # torch refuses to step an optimizer without gradients
        if program["catches"]:  # torch refuses to step after no backward, and no trace has the collectives of a scaler
            phase["scaler"] = None
        ops = []
        for op in phase["ops"]:
            if op[0] == "backward" and source.random() < 0.1:
                op[0] = "losses"
            if op[0] in BACKWARDS and phase["reduction"]:
                op[2] = True
            if op[0] == "step" and phase["scaler"] and source.random() < 0.3:
                ops.append(["overflow", source.random()])
            if op[0] == "step" and "+" in optimizer and source.random() < 0.4:
                op.append(source.randrange(2))
            ops.append(op)
            if op[0] == "step" and phase["average"] and source.random() < 0.5:
                ops.append(["average", source.randrange(100)])
        phase["ops"] = ops
        if "+" in optimizer and not phase["orig"] and any(op[0] == "overflow" for op in ops):
            # The optimizer that does not step keeps the infinity. By the next norm, NaN, zeros of a flat parameter turn
            # into NaN, and no gradient stays none
            phase["clip"] = None
        if source.random() < 0.6 and _may_be_dcps(program, phase):
            phase["kind"] = "dcp"


def _keeps_whole(phase):
    """Whether each rank has the whole of each parameter."""
    is_grid_of_one = phase["strategy"] in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2") and phase["inner"] == 1
    return phase["size"] == 1 or phase["strategy"] == "NO_SHARD" or is_grid_of_one


def _may_be_dcps(program, phase):
    """Whether torch saves and loads what is right, and tells of no fault.

    It takes buffers from any rank, asks for the state of an empty parameter that was not stepped, steps an optimizer
    that has not stepped, and takes a checkpoint for an older one if a rank has no rows of a tensor and no optimizer has
    state.
    """
    is_wrong = {each["kind"] for each in program["layers"]} & {"convolution", "buffered", "listed"}
    has_state = phase["optimizer"] in ("Adam", "AdamW") and ["step"] in phase["ops"] and not phase["scaler"]
    return has_state and not is_wrong and not program["faults"]


def _strike(source, program):
    """Draw faults for a phase of several ranks, if there is one. It is the last one then."""
    several = [i for i, phase in enumerate(program["phases"]) if phase["size"] > 1]
    if not several:
        return
    del program["phases"][source.choice(several) + 1 :]
    phase, layers = program["phases"][-1], len(program["layers"])
    ops = len(phase["ops"])
    points = (30 + 15 * ops, ops * (1 + layers), DISK_POINTS)  # about as many as there are
    number = source.choice([1, 1, 1, 2])
    places = range(3) if number == 1 and phase["kind"] == "ours" else range(2)
    drawn = faults.draw(program["seed"], phase["size"], number, points, faults.kinds_of(*places))
    program["machines"] = source.random() < 0.3
    if [each.kind for each in drawn] == ["is killed"] and source.random() < 0.3:
        program["host"] = drawn[0].rank
    one, other = drawn[0], drawn[-1]
    if source.random() < CATCHES:
        drawn = faults.draw(program["seed"], phase["size"], number, points, ["raises in user code"])
        drawn = [dataclasses.replace(each, seconds=source.choice([0.0, LONG])) for each in drawn]
        program |= {"host": None, "catches": True}
    elif faults.KINDS[one.kind][0] == faults.KINDS[other.kind][0] and source.random() < AT_ONE_MOMENT:
        drawn[-1] = dataclasses.replace(other, point=one.point)
    program["faults"] = [dataclasses.asdict(each) for each in drawn]


def _layer(source, name):
    return {
        "name": name,
        "kind": source.choice(list(KINDS)),
        "unit": source.random() < 0.7,
        "how": source.choice(HOW),
        "frozen": source.random() < 0.1,
        "double": source.random() < 0.1,
    }


def _divisors(size):
    return [n for n in range(1, size + 1) if size % n == 0]


def _has_unused(layers):
    return any(each["how"] == "unused" or each["kind"] == "experts" for each in layers)


def _phase(source, program, low, optimizer, first):
    has_list = any(each["kind"] == "listed" for each in program["layers"])
    no_clip = has_list or any(each["double"] for each in program["layers"])  # torch's norms take neither
    size = source.choice([2 if low else 1, 2, 2, 2, 3, 4, 4, 5, 6, 7, 8])
    phase = {
        "size": size,
        "strategy": source.choice(STRATEGIES),
        "inner": source.choice(_divisors(size)),
        "orig": source.random() < 0.5,
        "segments": True,
        "atomic": source.choice([None, None, "row"]),
        "alignment": source.choice([None, None, 16, 64]),
        "prefetch": source.choice([None, "BACKWARD_PRE", "BACKWARD_POST"]),
        "forward_prefetch": source.random() < 0.5,
        "min_unit_bytes": random.Random(f"{program['seed']}, {first}").choice([0, 0, 1000, 100_000]),
        "precision": source.choice(list(PRECISIONS)[1:]) if low else "fp32",
        "optimizer": optimizer,
        "clip": None if no_clip else source.choice([None, None, 0.5]),
        "set_to_none": optimizer != "SGD" or source.random() < 0.8,
        "kind": source.choice(["ours", "full"]),
        "ops": [],
    }
    steps = source.randint(1, 4)
    for i in range(steps):
        phase["ops"] += _ops_of_step(source, program, phase, (first + i) * 10)
    return phase


def _ops_of_step(source, program, phase, key):
    """Return what comes to one step of the optimizer, or to a skipped one."""
    names = [each["name"] for each in program["layers"]]
    freezable = [each["name"] for each in program["layers"] if each["unit"] or phase["orig"]]
    ops = []

    def may_be(chance, *op):
        if source.random() < chance:
            ops.append(list(op))

    if freezable and not phase["optimizer"].startswith("Adam"):  # a step number for a whole flat parameter
        may_be(0.15, "freeze", source.choice(freezable), source.random() < 0.5)
    may_be(0.1, "summon", source.choice(["embedding.weight", "head.weight"]))
    n = source.choice([1, 1, 2, 3])
    for i in range(n):
        synced = i == n - 1 or source.random() < 0.4 or not _may_accumulate(program["layers"], phase)
        may_be(0.05, "raise", key + 9, source.choice(names), source.choice(["forward", "backward"]))
        ops.append([source.choice(["backward"] * 9 + ["twice"]), key + i, synced])
        may_be(0.1, "evaluate", key + 8)
        may_be(0.1, "other", key + i)
    ops.append(["clear"] if source.random() < 0.1 else ["step"])
    return ops
