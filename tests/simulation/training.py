"""Play a random program on simulated ranks, beside its reference: ``play``."""

import contextlib
import gc
import mmap
import os
import pickle
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import Pipe
from pathlib import Path
from types import SimpleNamespace

import simulated
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    StateDictType,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy, checkpoint
from flatparam.fsdp.desync import same_unit
from flatparam.fsdp.unit.local_params import local_params_of

from . import bitwise, checkers, process
from .faults import Fault, UserError, user_code
from .programs import (
    DECAY,
    DEFAULTS,
    GRIDS,
    GROWTH_INTERVAL,
    PLAIN,
    PRECISIONS,
    SCALE,
    RaisedOnAllRanks,
    batch,
    build,
    draw,
    loss_of,
    losses_of,
    optimizers_of,
)
from .reference import Reference

SCALERS = {"GradScaler": torch.amp.GradScaler, "ShardedGradScaler": ShardedGradScaler}
# torch loses optimizer states in a ShardedTensor of which a rank has no rows, unless they are flattened
FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)
ENDS = {"is killed", "raises in user code", "has fewer batches"}  # kinds of faults that end the process at once


class _Caught:
    """Errors that ranks have caught alone: whether there are any. All ranks know it, also if they are processes."""

    def __init__(self):
        self._page = mmap.mmap(-1, 1)

    def append(self, error):
        self._page[0] = 1

    def __bool__(self):
        return self._page[0] != 0


def play(program, forked=False):
    """Play all phases; return (virtual seconds, digests, the faults that have struck as texts).

    ``forked``: each rank is a process. Raises: the first error of a rank, or of a check.
    """
    from . import forked as processes  # which need the libraries of the simulation, and this module
    from . import random_elastic, ranks

    warnings.simplefilter("ignore")

    program = PLAIN | program
    if "elastic" in program:
        return random_elastic.play(program)
    where = {"faults": [Fault(**each) for each in program["faults"]], "host": program["host"]}
    where |= {"machines": program["machines"]} | ({} if forked else {"device": program["device"]})
    pauses = {each.rank: each.seconds for each in where["faults"]}
    reference = Reference(program)
    carried, seconds, digests = None, 0.0, []
    with tempfile.TemporaryDirectory(prefix="flatparam-simulated") as folder:
        for i, phase in enumerate(program["phases"]):
            phase = DEFAULTS | phase | {"caught": _Caught() if program["catches"] else None, "pauses": pauses}
            events = _in_a_fork(reference.play, phase) if program["device"] else reference.play(phase)
            saved = Path(folder, str(i))
            modules = {rank: build(program) for rank in range(phase["size"])}

            groups = {}

            def prepare(rank, phase=phase, groups=groups):
                groups[rank] = groups_for(phase["strategy"], phase["inner"], backend_of(program))

            def live(rank, phase=phase, events=events, carried=carried, saved=saved, modules=modules, groups=groups):
                module = modules.pop(rank)
                layers = dict(module.layers.items())
                model = wrap(program, phase, module, groups.pop(rank))
                return Rank(rank, program, phase, model, layers, iter(events)).live(carried, saved)

            is_last = i == len(program["phases"]) - 1
            faulty = where if is_last else {}  # a program for devices has one phase
            faulty = faulty | {"prepare": prepare} | ({"finalized": False} if forked else {})
            run = (processes if forked else ranks).simulate(live, phase["size"], program["seed"], **faulty)
            seconds += run.seconds
            digests.append(run.digest)
            if all(fault.kind == "is late" for fault in run.struck):
                carried = run.must_end().results[0]
                if phase["average"] and not phase["caught"]:
                    _check_saved(program, _of_average(saved), reference.averaged)
            else:
                _check_struck(run, program, saved, events[-1][1])
    return seconds, digests, [str(fault) for fault in run.struck]


def _in_a_fork(function, *args):
    """Return ``function(*args)``, called in a fork: the first backward in a process starts autograd's threads."""
    here, there = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            there.send_bytes(pickle.dumps(function(*args)))
        finally:
            os._exit(0)
    there.close()
    try:
        return pickle.loads(here.recv_bytes())
    finally:
        os.waitpid(child, 0)


def _check_struck(run, program, saved, wanted):
    """Check a run in which faults have struck, and what it has left on the disk."""
    run = SimpleNamespace(**process.told(run))
    kinds = {fault.kind for fault in run.struck}
    alike = checkers.all_raise_alike if program["catches"] else checkers.all_are_told_alike
    # Ranks of two groups may meet two faults
    texts = alike, len(run.struck) if program["phases"][-1].get("strategy") in GRIDS else 1
    if "finds the disk full" in kinds:
        texts = (checkers.all_are_told_that_the_disk_is_full,)
    elif program["host"] is not None:
        texts = (checkers.all_are_told_that_the_store_is_gone,)
    # No connection breaks of ranks that wait in the store for one of another machine
    gone = checkers.STOPPED if program["machines"] else checkers.AT_ONCE
    least = 0.0
    if program["device"]:
        least = checkers.STOPPED if program["machines"] else checkers.WATCHED
        if program["phases"][-1]["strategy"].startswith(("ZERO_1", "LAYER_ZERO")):
            least += same_unit._CONNECTING.total_seconds()  # nothing interrupts a rank that connects gloo
    checks = [
        (checkers.nobody_waits_for_ever,),
        (checkers.nobody_computes_other_values,),
        (checkers.all_are_told_in_time, gone, least),
        texts,
    ]
    # The first rank of a save stays until the others have read that it has failed, 2 s at most
    is_save = any(kind == "CheckpointError" for kind, _, _ in run.errors.values())
    is_slow = program["machines"] or program["device"] or program["catches"] or is_save
    if len(run.struck) == 1 and kinds <= ENDS and not is_slow:
        checks.append((checkers.nobody_waits_until_the_lost_have_read,))
    for check, *arguments in checks:
        try:
            check(run, *arguments)
        except AssertionError as error:
            raise AssertionError(f"{error}\nnot true: {check.__name__}") from None
    if saved.exists():
        checkpoint.verify(saved)
        if program["catches"]:
            return
        _check_saved(program, saved, wanted)


def _check_saved(program, folder, wanted):
    module = build(program)
    checkpoint.load(folder, module)
    for name, param in module.named_parameters():
        assert bitwise.is_same(param, wanted[name]), f"`{name}` is not the saved one in {folder}"


def _of_average(folder):
    """Return the folder for the averaged weights of the model that is saved in ``folder``: it lies beside."""
    return folder.with_name(f"{folder.name} averaged")


def backend_of(program):
    """The backend of a process group for the program's device; None: it computes on the host."""
    return program["device"] and simulated.backend(program["on_host"])


def groups_for(strategy, inner, backend=None):
    """The process groups for a strategy with a grid: rows of ``inner`` ranks that follow each other. Else the world.

    ``backend``: as in ``new_group``; None: gloo, and None for the world.
    """
    world = dist.new_group(backend=backend) if backend else dist.group.WORLD
    if strategy not in GRIDS:
        return world if backend else None
    size, rank = dist.get_world_size(), dist.get_rank()
    rows = [list(range(i, i + inner)) for i in range(0, size, inner)]
    found = []
    for lists in (rows, [list(column) for column in zip(*rows, strict=True)]):
        made = [dist.new_group(each, backend=backend) for each in lists]
        found.append(next(group for group, each in zip(made, lists, strict=True) if rank in each))
    return (found[0], world) if strategy.startswith("LAYER_ZERO") else tuple(found)


def wrap(program, phase, module, groups):
    """``module`` with some of its layers, and itself, as units."""
    low, reduced = PRECISIONS[phase["precision"]]
    dtypes = low, reduced, phase["buffers"] and getattr(torch, phase["buffers"])
    arguments = {
        "sharding_strategy": ShardingStrategy[phase["strategy"]],
        "process_group": groups,
        "device_id": program["device"] and torch.sim.current_device(),
        "use_orig_params": phase["orig"],
        "segments": phase["segments"],
        "atomic": phase["atomic"],
        "shard_alignment": phase["alignment"],
        "backward_prefetch": phase["prefetch"] and BackwardPrefetch[phase["prefetch"]],
        "forward_prefetch": phase["forward_prefetch"],
        "min_unit_bytes": phase["min_unit_bytes"],
        "mixed_precision": MixedPrecision(*dtypes) if any(dtypes) else None,
        "reduction": phase["reduction"],
    }
    for each in program["layers"]:
        if each["unit"]:
            module.layers[each["name"]] = FSDP(module.layers[each["name"]], **arguments)
    return FSDP(module, **arguments)


class Rank:
    """One rank of a phase. Its methods ``_NAME`` do the op NAME."""

    on_device = False
    same = staticmethod(bitwise.check_same)

    def __init__(self, rank, program, phase, model, layers, events):
        self.rank, self.phase, self.events = rank, phase, events
        if program["device"]:
            self.on_device, self.same = True, bitwise.Later()
        self.caught = phase["caught"]  # errors that ranks have caught alone: no value is known after one; None: none is
        self.layers, self.model = layers, model
        self.optimizers = optimizers_of(phase["optimizer"], program, self.model)
        self.scaler = phase["scaler"] and SCALERS[phase["scaler"]](
            device="cpu", init_scale=SCALE, growth_interval=GROWTH_INTERVAL
        )
        self.other = nn.Linear(2, 2)
        self.others_optimizer = torch.optim.SGD(self.other.parameters(), lr=0.1)

    def live(self, carried, saved):
        if carried is not None:
            self._load(*carried)
        self._check_parameters()
        if self.phase["average"] == "AveragedModel":
            self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        elif self.phase["average"] == "lerp":
            self.average = [param.detach().clone() for param in self.model.parameters()]
        for name, *arguments in self.phase["ops"]:
            pause = 0.0
            try:
                user_code()
                pause = self._pause(name)
                getattr(self, f"_{name}")(*arguments)
            except UserError as error:
                if self.caught is None:
                    raise
                self.caught.append(error)
                time.sleep(pause)
                self._go_on()
        self._check_parameters()
        with FSDP.summon_full_params(self.model, writeback=False):
            if not self.caught:  # perhaps since just now, so it must not decide whether this rank gathers
                bitwise.check_whole(self.model, self.wanted, self.same)
        if self.on_device:
            torch.sim.synchronize()  # which tells of memory that was written to after it was freed
            if not self.caught:
                self.same.settle()
        if self.phase["average"]:
            with self._averaged() as model:
                checkpoint.save(_of_average(saved), model)
        return self._save(saved)

    def _pause(self, name):
        """Return for how long this rank may stay away after an exception in the op ``name``, and all are told of it.

        They wait for who may only be slower with what all raise, and for what a rank does alone.
        """
        is_alone = name in ("evaluate", "average") and self.phase["strategy"] == "NO_SHARD"
        return 0.0 if name == "raise" or is_alone else self.phase["pauses"].get(self.rank, 0.0)

    def _go_on(self):
        """Do what a user does who leaves out the rest of an op."""
        for layer in self.layers.values():
            layer.raises = None
        self.model.train()
        self._zero_grad()

    def _zero_grad(self):
        for each in self.optimizers:
            each.zero_grad()

    def _next(self, kind):
        """Return what the reference has computed; None: it is not known."""
        if self.caught:
            return None
        found, value = next(self.events)
        assert found == kind, (found, kind)
        return value

    def _check_parameters(self):
        self.wanted = self._next("parameters")
        if self.wanted is not None:
            bitwise.check_parameters(self.model, self.wanted, self.same)

    def _forward(self, key, model=None):
        output = (model or self.model)(*self._batch(key))
        if (wanted := self._next("output")) is not None:
            self.same(output, wanted[self.rank], "the output")
        return output

    def _batch(self, key):
        tokens, route = batch(key, self.rank)
        return tokens.to("sim") if self.on_device else tokens, route

    def _backward(self, key, synced, op="backward"):
        with contextlib.nullcontext() if synced else self.model.no_sync():
            losses = losses_of(op, self._forward(key))
            for i, loss in enumerate(losses):
                loss = self.scaler.scale(loss) if self.scaler else loss
                loss.backward(retain_graph=i < len(losses) - 1)

    def _twice(self, key, synced):
        self._backward(key, synced, "twice")

    def _losses(self, key, synced):
        self._backward(key, synced, "losses")

    def _overflow(self, where):
        if (place := self._next("overflow")) is None:
            return
        for local in local_params_of(self.model, buffers=False):
            for name in place.keys() & set(local.names):
                if (mine := local.slice_of(place[name])).any():
                    bitwise.gradient_of(local)[mine] = torch.inf

    def _step(self, which=None):
        stepped = [each for i, each in enumerate(self.optimizers) if which in (None, i)]
        if self.phase["clip"] is not None:
            for each in stepped if self.scaler else ():
                self.scaler.unscale_(each)
            self.model.clip_grad_norm_(self.phase["clip"], float("inf"))
        if (wanted := self._next("gradients")) is not None:
            bitwise.check_gradients(self.model, wanted, self.same)
            bitwise.check_rest(self.model)
        for each in stepped:
            self.scaler.step(each) if self.scaler else each.step()
        if self.scaler and stepped:
            self.scaler.update()
            if (wanted := self._next("scale")) is not None:
                assert self.scaler.get_scale() == wanted, f"the scale is {self.scaler.get_scale()}, not {wanted}"
        for each in stepped:
            each.zero_grad(self.phase["set_to_none"])
        self._check_parameters()
        if self.phase["average"] == "AveragedModel":
            self.average.update_parameters(self.model)
        elif self.phase["average"] == "lerp":
            with torch.no_grad():
                for average, param in zip(self.average, self.model.parameters(), strict=True):
                    average.lerp_(param, 1 - DECAY)

    @contextlib.contextmanager
    def _averaged(self):
        """A model with the averaged weights."""
        if self.phase["average"] == "AveragedModel":
            yield self.average.module
            return
        params = list(self.model.parameters())
        trained = [param.detach().clone() for param in params]
        with torch.no_grad():
            torch._foreach_copy_(params, self.average)
        try:
            yield self.model
        finally:
            with torch.no_grad():
                torch._foreach_copy_(params, trained)

    def _average(self, key):
        if self.phase["average"] is None:
            return
        with self._averaged() as model:
            if (wanted := self._next("averaged")) is not None:
                bitwise.check_parameters(model, wanted, self.same)
            model.eval()
            with torch.no_grad():
                self._forward(key, model)
            self.model.train()

    def _clear(self):
        for each in self.optimizers:
            each.zero_grad(self.phase["set_to_none"])

    def _evaluate(self, key):
        self.model.eval()
        with torch.no_grad():
            self._forward(key)
        self.model.train()

    def _raise(self, key, layer, where):
        self.layers[layer].raises = where
        with contextlib.suppress(RaisedOnAllRanks):
            loss_of(self.model(*self._batch(key))).backward()
        self.layers[layer].raises = None
        self._zero_grad()

    def _summon(self, name):
        with FSDP.summon_full_params(self.model), torch.no_grad():
            self.model.module.get_parameter(name).add_(0.125)

    def _freeze(self, layer, frozen):
        self.model.module.layers[layer].requires_grad_(not frozen)

    def _other(self, key):
        self.other(torch.ones(1, 2)).sum().backward()
        self.others_optimizer.step()
        self.others_optimizer.zero_grad()

    def _save(self, folder):
        kind = self.phase["kind"]
        if kind == "ours":
            checkpoint.save(folder, self.model, self.optimizers)
        elif kind == "dcp":
            dcp.save(self._states(), checkpoint_id=folder)
            dist.barrier()  # rank 0 may wait yet for the end of its broadcast, which a rank that ends would break
        else:
            with self._full():
                states = [FSDP.optim_state_dict(self.model, each) for each in self.optimizers]
                return "full", (self.model.state_dict(), states)
        return kind, folder

    def _load(self, kind, saved):
        if kind == "ours":
            checkpoint.load(saved, self.model, self.optimizers)
        elif kind == "dcp":
            states = self._states()
            dcp.load(states, checkpoint_id=saved)
            given = {"model_state_dict": states["model"], "optim_state_dict": states["optimizers"]}
            set_state_dict(self.model, self.optimizers, **given, options=FLATTENED)
        else:
            weights, states = saved
            with self._full():
                self.model.load_state_dict(weights)
                for each, state in zip(self.optimizers, states, strict=True):
                    each.load_state_dict(FSDP.optim_state_dict_to_load(self.model, each, state))

    def _states(self):
        found = get_state_dict(self.model, self.optimizers, options=FLATTENED)
        return dict(zip(("model", "optimizers"), found, strict=True))

    def _full(self):
        configs = FullStateDictConfig(), FullOptimStateDictConfig()
        return FSDP.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, *configs)


def play_seeds(first, last, kind=""):
    """Play the programs of seeds until one fails, is struck by a fault, or is for devices.

    Such a run leaves threads and worlds behind, and one for devices must be the first of its process.
    Args: ``kind``: as in ``draw``; "forked": each rank is a process. Returns a list of (seed, virtual seconds, digests,
    error or None).
    """
    found = []
    gc.disable()  # each run collects before and after it
    for seed in range(first, last):
        try:
            program = draw(seed, kind)
            if program["device"] and found:
                break
            seconds, digests, struck = play(program, kind == "forked")
            found.append((seed, seconds, digests, None))
        except BaseException:
            found.append((seed, 0.0, [], traceback.format_exc()))
            break
        if struck or program["device"]:
            break
    return found
