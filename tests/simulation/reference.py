"""What a program must compute: the unsharded module, with the data of all ranks, and their gradients summed by hand.

The order of a sum and the dtype of each rounding are those that the strategy states: see ``Reference.reduce``.
"""

import copy

import torch
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState

from .programs import (
    DECAY,
    GRIDS,
    GROWTH_INTERVAL,
    PRECISIONS,
    SCALE,
    RaisedOnAllRanks,
    batch,
    build,
    loss_of,
    losses_of,
    optimizers_of,
)


def divisors(size):
    """Divisors of an average, before and after the sum, as torch's own hooks of gradients have them."""
    before = DefaultState._get_gradient_predivide_factor(size)
    return before, size / before


class Reference:
    """Plays phases, and returns for each a list of events.

    An event is ``("output", the outputs by rank)``, or ``("gradients", tensors or None by name)``, or ``("parameters",
    tensors by name)``, so ``"averaged"``; ``("overflow", by name: where)``, ``("scale", a number)``.

    ``averaged``: the averaged weights after a phase.
    """

    def __init__(self, program):
        self.program = program
        self.module = build(program)
        self.names = dict(self.module.named_parameters())
        self.all_names = dict(self.module.named_parameters(remove_duplicate=False))
        self.optimizers = optimizers_of(program["phases"][0]["optimizer"], program, self.module)
        self.buffers = [self._buffers()]
        self.kind = None  # of the file that the phase loads

    def play(self, phase):
        self.phase, self.events = phase, []
        size = phase["size"]
        if len(self.buffers) != size or self.kind != "ours":  # of another world all ranks get rank 0's
            self.buffers = [copy.deepcopy(self.buffers[0]) for _ in range(size)]
        if phase["buffers"]:
            self._cast_buffers(getattr(torch, phase["buffers"]))
        was_saved = self.kind == "ours"  # gradients, too
        self.kind = phase["kind"]
        self.before, self.after = divisors(size)
        inner = phase["inner"] if phase["strategy"] in GRIDS else size
        self.rows = [range(i, i + inner) for i in range(0, size, inner)]
        nested = phase["strategy"] == "LAYER_ZERO_NESTED" and 1 < inner < size
        if phase["strategy"].startswith("LAYER_ZERO") and not nested:
            self.rows = [range(size)]
        self.nested = nested
        self.kept = {}  # by name: the sums of micro-batches that are not reduced, of each rank or (nested) of each row
        if not was_saved:
            self.clear()
        for each in self.program["layers"]:
            self._freeze(each["name"], each["frozen"])
        self._note_parameters()
        self.averaged = {name: param.detach().clone() for name, param in self.all_names.items()}
        self.averaged_buffers, self.averages = list(self.buffers), 0
        self.scale, self.since_growth = SCALE, 0
        for name, *arguments in phase["ops"]:
            getattr(self, f"_{name}")(*arguments)
        self._note_parameters()
        self._cast_buffers(None)
        return self.events

    def clear(self, set_to_none=True):
        self.kept = {}
        for each in self.optimizers:
            each.zero_grad(set_to_none)

    def _cast_buffers(self, dtype):
        """Cast them to ``dtype``, or to what the module has."""
        own = {name: buffer.dtype for name, buffer in self.module.named_buffers()}
        for buffers in self.buffers:
            for name, value in buffers.items():
                buffers[name] = value.to((dtype or own[name]) if value.is_floating_point() else value.dtype)

    def _buffers(self):
        return {name: buffer.clone() for name, buffer in self.module.named_buffers()}

    def _forward(self, module, key, rank, buffers=None):
        for path, inner in module.named_modules():
            for name in inner._buffers:
                of_rank = (buffers or self.buffers)[rank]
                inner._buffers[name] = of_rank[f"{path}.{name}" if path else name].clone()
        output = module(*batch(key, rank))
        self.outputs.append(output.detach())
        return output

    def _computing(self):
        low = PRECISIONS[self.phase["precision"]][0]
        if low is None and not self.phase["buffers"]:
            return self.module
        return copy.deepcopy(self.module).to(dtype=low)

    def _backward(self, key, synced, op="backward"):
        self.outputs = []
        found = []  # by backward and rank
        for rank in range(self.phase["size"]):
            module = self._computing()
            losses = losses_of(op, self._forward(module, key, rank))
            mine = []
            params = self.names if module is self.module else dict(module.named_parameters())
            before = [param.grad for param in params.values()]
            for i, loss in enumerate(losses):
                for param in params.values():
                    param.grad = None
                loss = loss * self.scale if self.phase["scaler"] else loss
                loss.backward(retain_graph=i < len(losses) - 1)
                mine.append({name: param.grad for name, param in params.items()})
            for param, grad in zip(params.values(), before, strict=True):
                param.grad = grad
            found.append(mine)
            self._keep_buffers(rank, module)
        self.events.append(("output", self.outputs))
        for of_ranks in zip(*found, strict=True):
            self._add(of_ranks, synced)

    def _keep_buffers(self, rank, module):
        self.buffers[rank] = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def _twice(self, key, synced):
        self._backward(key, synced, "twice")

    def _losses(self, key, synced):
        self._backward(key, synced, "losses")

    def _add(self, of_ranks, synced):
        """Add gradients of one backward, dicts by rank."""
        for name, param in self.names.items():
            grads = [each[name] for each in of_ranks]
            if self.phase["reduction"]:
                for grad in grads:
                    if grad is not None:
                        grad = grad.to(self._wire(param)).to(param.dtype)
                        param.grad = grad if param.grad is None else param.grad + grad
                continue
            kept = self.kept.get(name)
            if kept is None and all(grad is None for grad in grads):
                continue
            grads = [torch.zeros_like(param) if grad is None else grad for grad in grads]
            wire = self._wire(param)
            if self.nested:
                grads = [self._sum([grads[rank].to(wire) / self.before for rank in row]) for row in self.rows]
            if kept is not None or not synced or self.nested:
                grads = [grad.to(param.dtype) for grad in grads]
                grads = grads if kept is None else [a + b for a, b in zip(kept, grads, strict=True)]
            if not synced and self.phase["size"] > 1:  # else nothing is reduced
                self.kept[name] = grads
                continue
            self.kept.pop(name, None)
            total = self._reduce(grads, wire).to(param.dtype)
            param.grad = total if param.grad is None else param.grad + total

    def _wire(self, param):
        """The dtype in which gradients are summed over ranks."""
        low, reduced = PRECISIONS[self.phase["precision"]]
        return reduced or (None if self.phase["strategy"].startswith("LAYER_ZERO") else low) or param.dtype

    def _sum(self, tensors):
        total = tensors[0]
        for tensor in tensors[1:]:
            total = total + tensor
        return total

    def _reduce(self, grads, wire):
        if self.nested:
            return self._sum([grad.to(wire) for grad in grads]) / self.after
        sent = [grad.to(wire) / self.before for grad in grads]
        return self._sum([self._sum([sent[rank] for rank in row]) for row in self.rows]) / self.after

    def _overflow(self, where):
        params = [param for param in self.names.values() if param.grad is not None and param.numel()]
        param = params[int(where * len(params))]
        place = torch.zeros_like(param, dtype=torch.bool)
        place.view(-1)[int(where * param.numel())] = True
        param.grad = torch.where(place, torch.inf, param.grad)
        names = [each for each, other in self.all_names.items() if other is param]
        self.events.append(("overflow", dict.fromkeys(names, place)))

    def _step(self, which=None):
        stepped = [each for i, each in enumerate(self.optimizers) if which in (None, i)]
        clip = self.phase["clip"]
        is_finite = dict.fromkeys(stepped, True)
        if self.phase["scaler"] and clip is not None:
            is_finite = {each: self._unscale(each) for each in stepped}
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([p for p in self.names.values() if p.numel()], clip, float("inf"))
        grads = {name: param.grad for name, param in self.all_names.items()}
        self.events.append(("gradients", {n: None if grad is None else grad.clone() for n, grad in grads.items()}))
        if self.phase["scaler"] and clip is None:
            is_finite = {each: self._unscale(each) for each in stepped}
        for each in stepped:
            if is_finite[each]:
                each.step()
        if self.phase["scaler"] and stepped:
            self._update_scale(all(is_finite.values()))
        for each in stepped:
            each.zero_grad(self.phase["set_to_none"])
        self._note_parameters()
        self._take_average()

    def _unscale(self, optimizer):
        """Return whether all gradients are finite."""
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for grad in grads:
            grad.div_(self.scale)
        return all(grad.isfinite().all() for grad in grads)

    def _update_scale(self, is_finite):
        self.since_growth = self.since_growth + 1 if is_finite else 0
        if not is_finite:
            self.scale /= 2
        elif self.since_growth == GROWTH_INTERVAL:
            self.scale, self.since_growth = self.scale * 2, 0
        self.events.append(("scale", self.scale))

    def _take_average(self):
        """Average the weights; the first ones of an ``AveragedModel`` are copied."""
        copies = self.phase["average"] == "AveragedModel" and not self.averages
        for name, param in self.all_names.items():
            mine = self.averaged[name]
            self.averaged[name] = param.detach().clone() if copies else mine + (1 - DECAY) * (param.detach() - mine)
        self.averages += 1
        self.averaged_buffers = list(self.buffers)

    @torch.no_grad()
    def _average(self, key):
        if self.phase["average"] is None:
            return
        self.events.append(("averaged", dict(self.averaged)))
        module = copy.deepcopy(self.module).eval()
        for name, param in module.named_parameters():
            param.copy_(self.averaged[name])
        module.to(dtype=PRECISIONS[self.phase["precision"]][0])
        self.outputs = []
        for rank in range(self.phase["size"]):
            buffers = self.averaged_buffers if self.phase["average"] == "AveragedModel" else None
            self._forward(module, key, rank, buffers)
        self.events.append(("output", self.outputs))

    def _note_parameters(self):
        found = {name: param.detach().clone() for name, param in self.all_names.items()}
        self.events.append(("parameters", found))

    def _clear(self):
        self.clear(self.phase["set_to_none"])

    @torch.no_grad()
    def _evaluate(self, key):
        self.outputs = []
        for rank in range(self.phase["size"]):
            self._forward(self._computing().eval(), key, rank)
        self.module.train()
        self.events.append(("output", self.outputs))

    def _raise(self, key, layer, where):
        before = [param.grad for param in self.names.values()]
        for rank in range(self.phase["size"]):
            self.outputs = []
            module = self._computing()
            module.layers[layer].raises = where
            try:
                loss_of(self._forward(module, key, rank)).backward()
            except RaisedOnAllRanks:
                pass
            module.layers[layer].raises = None
            self._keep_buffers(rank, module)
        for param, grad in zip(self.names.values(), before, strict=True):
            param.grad = grad
        self.clear()

    @torch.no_grad()
    def _summon(self, name):
        self.module.get_parameter(name).add_(0.125)

    def _freeze(self, layer, frozen):
        self.module.layers[layer].requires_grad_(not frozen)

    def _other(self, key):
        pass
