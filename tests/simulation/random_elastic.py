"""Random programs of ``flatparam.elastic``: ranks are lost and join, and the others train as the unsharded module.

A program is one of ``programs.py`` with one phase and these decisions more, under ``elastic``:

| key | value |
|---|---|
| `redundancy`, `every` | of ``elastic.start`` |
| `joins` | for each new process its slot, and the seconds from the end of the one before to its beginning |
| `harms` | step, rank, and what happens to its copy or parity after that step, see ``elastic_programs.harm`` |

Simulated ranks are the processes of the slots, then the new ones in the order of ``joins``, then one that does what the
launchers of all slots do, see ``flatparam/elastic/__main__.py``. It has no faults.
"""

import contextlib
import copy
import datetime
import math
import threading
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import elastic
from flatparam.common.redundancy import group_of
from flatparam.elastic import training as product
from flatparam.elastic.epochs import Epochs
from flatparam.elastic.resizing import dividing, inner_sizes
from flatparam.fsdp.desync.stores import all_groups, store_of_world
from flatparam.fsdp.errors import OrderError, StateError

from . import bitwise, process
from .elastic_programs import harm
from .faults import Fault, user_code
from .programs import DEFAULTS, GRIDS, build, optimizers_of
from .reference import Reference
from .training import Rank, groups_for, wrap

LOOKING = 1.0  # seconds from one look of a launcher to the next
ENDING = 60.0  # seconds after which launchers end the job of a rank that has raised: all others have been told before
ANSWERING = 0.9  # a call must be answered in 1.6 s, see liveness.py, and a rank looks for calls every 0.7 s
LIMIT = 900.0  # virtual seconds of a run
NO_STATE = product._NOT_COMMITTED
LOST = "start again from the newest checkpoint"
MAY_RAISE = {"Replaced", "OrderError", "CheckpointError", "StateError", "UserError"}  # a rank that a fault has struck


class _Session(product.Session):
    """Notes in ``log`` from which state each epoch goes on."""

    log: "_Log"

    def _bind(self, found):
        super()._bind(found)
        self.log.sources[self.epoch.number] = found.key
        for epoch in (self.epoch, *(one.epoch for one in self.generations)):
            self.log.members[epoch.number] = epoch.members


class _Log:
    """What one simulated rank has seen. ``members``: by epoch; ``sources``: by epoch, the key of its first state.

    ``inner``: by epoch, the size of the inner groups: the world of the first build may have been smaller than the job.

    ``steps``: (epoch, step) -> what it has computed there; ``whole``: the newest key of which all have all pieces;
    ``unsure``: the key of the step whose values are not valid if the device was waiting for another rank in it;
    ``harmed``: keys of pieces here; ``end``: the error with which it ended, or "ends"; "": it was killed;
    ``is_cut``: by its launcher, when the job had ended.
    """

    def __init__(self, member):
        self.member = member
        self.members, self.sources, self.steps, self.whole, self.harmed = {}, {}, {}, None, []
        self.inner, self.unsure = {}, None
        self.is_born, self.begins = member.endswith(".0"), threading.Event()
        self.end, self.is_cut = "", False


def play(program):
    """Play the program, and check it; return (virtual seconds, digests, the faults that have struck as texts)."""
    from . import ranks

    phase = DEFAULTS | program["phases"][0] | {"caught": ["compared later"], "pauses": {}}
    size, joins = phase["size"], program["elastic"]["joins"]
    members = members_of(program)
    logs = [_Log(member) for member in members]
    modules = [build(program) for _ in members]

    def live(rank):
        store = store_of_world()
        dist.destroy_process_group()
        if rank == len(members):
            return _launch(ranks, store, program, logs)
        log, end = logs[rank], "ends"
        if rank >= size:
            log.begins.wait()
            if not log.is_born:
                return None
            time.sleep(joins[rank - size][1])
        try:
            return _train(program, phase, store, log, modules[rank])
        except BaseException as error:
            end = type(error).__name__
            # An OrderError says that the newest values may be invalid; other errors of the loop come from one
            while program["device"] and error is not None and log.unsure is None:
                log.unsure = max(log.steps, default=None) if isinstance(error, OrderError) else None
                error = error.__cause__ or error.__context__
            raise
        finally:
            if not ranks.has_ended(rank):
                log.end = end

    where = {"faults": [Fault(**each) for each in program["faults"]]}
    where |= {"machines": program["machines"], "device": program["device"]}
    run = ranks.simulate(live, len(members) + 1, program["seed"], limit=LIMIT, **where)
    told = SimpleNamespace(**process.told(run))
    try:
        _check(program, phase, told, logs)
    except AssertionError as error:
        raise AssertionError(f"{told.story}{error}") from error
    return run.seconds, [run.digest], [str(fault) for fault in run.struck]


def members_of(program):
    """Return the name of each simulated rank as a member."""
    size, found = program["phases"][0]["size"], []
    for slot in [*range(size), *(slot for slot, _ in program["elastic"]["joins"])]:
        found.append(f"{slot}.{sum(one.split('.')[0] == str(slot) for one in found)}")
    return found


def steps_of(phase):
    """Return the ops of each step."""
    found = [[]]
    for op in phase["ops"]:
        found[-1].append(op)
        if op[0] in ("step", "clear"):
            found.append([])
    return found[:-1]


# The ranks


def _train(program, phase, store, log, module):
    """Return the parameters, None if a rank is lost after the training; the steps of the scheduler; a random number."""
    size, decided = phase["size"], program["elastic"]
    session = _Session(store, log.member, size, decided["redundancy"], decided["every"], datetime.timedelta(seconds=60))
    session.log = log

    def built():
        mine = copy.deepcopy(module)  # also if ranks are lost in it, and it is called again
        one.layers = dict(mine.layers.items())
        inner = dividing(phase["inner"], dist.get_world_size())
        one.model = wrap(program, phase, mine, groups_for(phase["strategy"], inner))
        one.optimizers = optimizers_of(phase["optimizer"], program, one.model)
        return one.model, one.optimizers[0]

    one = _Rank(phase, program["device"] is not None)
    torch.manual_seed(int(log.member.split(".")[0]))
    try:
        model, optimizer = product.begin_session(session, built)
    except SystemExit as error:
        if error.code:
            raise
        return None
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    steps = steps_of(phase)
    for step in elastic.steps(model, optimizer, len(steps), extra=schedule):
        with elastic.survive():
            _look(session, log, phase["strategy"] in GRIDS)
            time.sleep(0.01)
            one.begin(elastic.rank())
            for name, *arguments in steps[step]:
                user_code()
                getattr(one, f"_{name}")(*arguments)
            schedule.step()
            log.steps[session.epoch.number, step] = [*(each.cpu() for each in one.outputs), torch.rand(())]
            for when, slot, what in decided["harms"]:
                if (when, f"{slot}.0") == (step, log.member):
                    _harm(session.generations, what, log)
    assert schedule.last_epoch == len(steps)
    number = torch.rand(())
    try:
        with FSDP.summon_full_params(model, writeback=False):
            return {name: param.detach().cpu().clone() for name, param in model.named_parameters()}, number
    except OrderError:
        return None, number


def _look(session, log, is_grid):
    """Note what is committed. No copies and process groups of older epochs are left."""
    kept = session.generations
    groups = 5 if is_grid else 2  # the world, and the group of its copies; inner and outer groups
    assert len(all_groups()) <= groups, "process groups of older epochs are left"
    assert len(kept) <= 3, "copies of older epochs are left"
    log.members[session.epoch.number] = session.epoch.members
    log.inner[session.epoch.number] = inner_sizes(session.model)[0]
    if len(kept) > 1 and kept[-2].epoch == session.epoch:
        log.whole = kept[-2].key


def _harm(kept, what, log):
    """Spoil the newest piece once, if it is whole, and there is one of the step before in this epoch."""
    *_, before, last = [None, None, *kept]
    if before is None or not last.is_whole or len(last.ranks) == 1 or last.key in log.harmed:
        return
    if before.epoch == last.epoch and before.data.numel() == last.data.numel():
        harm(last, before, what)
        log.harmed.append(last.key)


class _Rank(Rank):
    """Does the ops of a step, and keeps the outputs."""

    def __init__(self, phase, on_device):
        self.phase, self.caught, self.outputs, self.on_device = phase, phase["caught"], [], on_device
        self.scaler = None

    def begin(self, rank):
        self.rank, self.outputs = rank, []
        for layer in self.layers.values():  # the step before may have been left in the middle
            layer.raises = None
        self.model.train()

    def _forward(self, key):
        output = super()._forward(key)
        self.outputs.append(output.detach().clone())
        return output


# The launchers


def _launch(ranks, store, program, logs):
    """Do what the launchers do: tell of processes that were killed, start new ones, and end the job if one raises."""
    drops = [Epochs(store, log.member).drops(program["phases"][0]["size"]) for log in logs]
    followed, failed = set(), math.inf
    while running := [rank for rank, log in enumerate(logs) if log.is_born and not ranks.has_ended(rank)]:
        time.sleep(LOOKING)
        for rank, log in enumerate(logs):
            if not log.is_born or rank in followed:
                continue
            epochs = Epochs(store, log.member)
            if not ranks.has_ended(rank):
                if program["machines"] or not _is_dropped(drops[rank]):
                    continue
                ranks.kill(rank)
            followed.add(rank)
            if log.end == "ends":
                epochs.finish()
            elif log.end not in ("", "Replaced"):
                failed = min(failed, ranks.now())
            elif not (program["machines"] or epochs.has_left()):  # else the launcher is lost, too, or the job ends
                epochs.end(log.member, f"{log.member} was killed by SIGKILL")
                _start_next(logs, log.member)
        if ranks.now() - failed > ENDING:
            for rank in running:
                logs[rank].is_cut = not ranks.has_ended(rank)
                ranks.kill(rank)
    for log in logs:
        log.begins.set()


def _is_dropped(drops):
    with contextlib.suppress(StateError):
        return next(drops, None) is not None
    return False


def _start_next(logs, member):
    slot, life = member.split(".")
    for log in logs:
        if log.member == f"{slot}.{int(life) + 1}":
            log.is_born = True
            log.begins.set()


# The checks


def _check(program, phase, run, logs):
    """All that have no fault end with the right bits, or raise one error, and only where the state is lost."""
    assert run.reason == 0, "a rank waits for ever"
    assert len(logs) not in run.errors, run.errors[len(logs)]
    missed = {  # who answers no call while another rank is lost is taken for lost, too
        fault.rank
        for fault in run.struck
        if fault.seconds > ANSWERING and len(run.struck) > 1
        if run.errors.get(fault.rank, ["Replaced"])[0] == "Replaced" and run.results.get(fault.rank) is None
    }
    struck = missed | {fault.rank for fault in run.struck if fault.kind != "is late"}
    mine = {rank: log for rank, log in enumerate(logs) if rank not in struck and log.is_born}
    errors = {run.errors[rank][:2] for rank in mine if rank in run.errors}
    ended = {logs[rank].member: value for rank, value in run.results.items() if value is not None}
    for rank in struck:
        assert rank not in run.errors or run.errors[rank][0] in MAY_RAISE, run.errors[rank]
    users = [fault.rank for fault in run.struck if fault.kind == "raises in user code"]
    if users:
        told = f"rank {users[0]} has raised an error of its own"
        assert all(kind == "OrderError" and text.startswith(told) for kind, text in errors), errors
        assert not ended, "some have ended well"
    elif errors:
        assert len(errors) == 1, f"the ranks raise {errors}"
        assert not ended, f"some have ended well, others raise {errors}"
        _check_lost(*errors.pop(), program, struck, mine, logs)
    else:
        cut = [log.member for log in mine.values() if log.is_cut and (log.members or log.member.endswith(".0"))]
        assert not cut, f"{cut} had to be ended"
        assert ended or not any(log.member.endswith(".0") for log in mine.values()), "nobody has ended well"
    if _newest(mine)[1]:
        _check_values(program, phase, mine, logs, ended)


def _newest(mine):
    """Return the newest epoch that one of the ranks ``mine`` has come to with its state, and its members."""
    return max(((epoch, members) for log in mine.values() for epoch, members in log.members.items()), default=(0, []))


def _check_lost(kind, text, program, struck, mine, logs):
    """Ranks may raise this error only if pieces of one group of ranks are lost on two of them."""
    whole = max((log.whole for log in mine.values() if log.whole), default=None)
    if kind == "StateError" and "all ranks were killed" in text:
        assert not any(log.member.endswith(".0") for log in mine.values()), text
        return
    is_at_start = kind == "StateError" and (text == NO_STATE or text.startswith("elastic.start: of"))
    assert is_at_start or (kind == "CheckpointError" and LOST in text), f"{kind}: {text}"
    if whole is None:
        return
    assert not is_at_start or whole[1] == 0, f"{text}, but step {whole[1]} is committed"
    members = next(log.members[whole[0]] for log in mine.values() if whole[0] in log.members)
    lost = {logs[rank].member for rank in struck} | set(members) - set(_newest(mine)[1])
    spoilt = lost | {log.member for log in logs if whole in log.harmed}
    redundancy = program["elastic"]["redundancy"]
    groups = [group_of(rank, len(members), redundancy) for rank in range(len(members))]
    is_lost = any(len(spoilt & {members[rank] for rank in ranks}) > 1 for ranks in groups)
    assert is_lost, f"{text}; but of {members} at {whole} only {spoilt} are lost"


def _check_values(program, phase, mine, logs, ended):
    """Compare with the unsharded module, trained on the batches of the ranks that each step had in the end."""
    sources, members, inner = {}, {}, {}
    for log in logs:
        members |= log.members
        inner |= log.inner
        for epoch, key in log.sources.items():
            assert sources.setdefault(epoch, key) == key, f"epoch {epoch} goes on from {key} and {sources[epoch]}"
    steps, (epoch, _) = steps_of(phase), _newest(mine)
    done = [step + 1 for log in mine.values() for at, step in log.steps if at == epoch]
    chain = [(epoch, len(steps) if ended else max(done, default=sources.get(epoch, (0, 0))[1]))]
    while (epoch := chain[0][0]) in sources:
        chain.insert(0, sources[epoch])
    of_member = {log.member: log for log in logs}
    reference = Reference(program)
    schedule = torch.optim.lr_scheduler.StepLR(reference.optimizers[0], 2, 0.5)
    begin, states = 0, [_seeded(name) for name in members.get(chain[0][0], [])]
    for epoch, end in chain:
        names = members.get(epoch, [])
        here = phase | {"size": len(names), "inner": inner.get(epoch, 1)}
        states = [states[rank % len(states)] for rank in range(len(names))]
        generators = [torch.Generator().set_state(state) for state in states]
        reference.buffers = reference.buffers[:1]  # all get those of the first rank
        reference.play(here | {"ops": []})
        for step in range(begin, end):
            events = reference.play(here | {"ops": steps[step]})
            schedule.step()
            outputs = [value for kind, value in events if kind == "output"]
            for rank, name in enumerate(names):
                wanted = [*(each[rank] for each in outputs), torch.rand((), generator=generators[rank])]
                found = of_member[name].steps.get((epoch, step))
                is_last = (epoch, end) == chain[-1] and not ended
                assert found or is_last or of_member[name] not in mine.values(), f"{name} has not done step {step}"
                is_unsure = (epoch, step) == of_member[name].unsure
                for one, other in zip(wanted if is_unsure or not found else found, wanted, strict=True):
                    assert bitwise.is_same(one, other), f"{name} computes other values in step {step} of epoch {epoch}"
        begin, states = end, [one.get_state() for one in generators]
    for name, (params, number) in ended.items():
        assert number == torch.rand((), generator=torch.Generator().set_state(states[names.index(name)])), name
        for param, value in (params or {}).items():
            assert bitwise.is_same(value, reference.names[param]), f"{name} has another `{param}` at the end"


def _seeded(member):
    return torch.Generator().manual_seed(int(member.split(".")[0])).get_state()
