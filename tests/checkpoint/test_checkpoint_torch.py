"""torch's distributed checkpoint reads ours into plain and FSDP2 models; ours reads torch's, of FSDP1 and FSDP2.

Promises:
- torch and FSDP2 read ours; ours reads FSDP1's and FSDP2's, in safetensors and behind a pickle; the commands, with
  equal units and tensors in one line
"""

import contextlib
import io
import itertools

import forked_scripts
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import Odd, adam, differing, full_state, train, wrapped
from fsdp_models import Model, make, wrap_blocks
from gloo import fake_world, run_ranks
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import StateDictType, fully_shard

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import checkpoint
from flatparam.checkpoint import CheckpointError, cli

pytestmark = pytest.mark.multiprocess


def named_state(module, optimizer):
    """Of a plain model, as ``full_state`` has it."""
    found = {name: value.detach().clone() for name, value in module.named_parameters()}
    found |= {name: value.clone() for name, value in module.named_buffers() if "seen" in name}
    names = {param: name for name, param in module.named_parameters()}
    for key in ("exp_avg", "exp_avg_sq", "step"):
        for param, state in optimizer.state.items():
            found[f"{key} of {names[param]}"] = torch.zeros_like(param) + state[key]
    return found


def ours_is_read(folder):
    for strategy in ("FULL_SHARD", "LAYER_ZERO_NESTED"):
        model = wrapped(strategy)
        optimizer = adam(model)
        train(model, optimizer, 0, 2)
        path = folder / strategy
        checkpoint.save(path, model, optimizer)
        wanted = full_state(model, optimizer)
        torch.manual_seed(9)
        module = Odd()
        state = module.state_dict()
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path / "model")))
        module.load_state_dict(state)
        plain = {name: value for name, value in wanted.items() if " of " not in name}
        found = {**dict(module.named_parameters()), "seen": module.seen}
        assert not differing({name: value.detach() for name, value in found.items()}, plain)
        moments = {
            f"state.{name.split(' of ')[1]}.{name.split(' of ')[0]}": torch.zeros_like(value)
            for name, value in wanted.items()
            if name.startswith("exp_avg")
        }
        dcp.load(moments, storage_reader=HuggingFaceStorageReader(str(path / "optimizer")))
        for name, value in wanted.items():
            if name.startswith("exp_avg"):
                key, _, param = name.partition(" of ")
                assert torch.equal(moments[f"state.{param}.{key}"], value), name


def test_torch_reads_ours(tmp_path):
    run_ranks(ours_is_read, 2, tmp_path)


def torchs(kind, mesh, seed):
    module = make(seed)
    if kind == "fsdp1":
        return TorchFSDP(module, use_orig_params=True, device_mesh=mesh, device_id=torch.device("cpu"))
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def torchs_go_on_from_ours(folder):
    """FSDP1 and FSDP2 read the boxes of model and optimizer, and train on as ours does."""
    model = wrapped("LAYER_ZERO_NESTED", cls=Model)
    optimizer = adam(model)
    train(model, optimizer, 0, 2)
    checkpoint.save(folder / "one", model, optimizer)
    wanted = train(model, optimizer, 2, 2)
    mesh, flat = init_device_mesh("cpu", (2,)), StateDictOptions(flatten_optimizer_state_dict=True)
    for kind in ("fsdp1", "fsdp2"):
        other = torchs(kind, mesh, seed=9)
        others = adam(other)
        state, optim = get_model_state_dict(other), get_optimizer_state_dict(other, others, options=flat)
        kept = {name: value for name, value in optim.items() if name.startswith("state.")}
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder / "one" / "model")))
        dcp.load(kept, storage_reader=HuggingFaceStorageReader(str(folder / "one" / "optimizer")))
        set_model_state_dict(other, state)
        set_optimizer_state_dict(other, others, optim | kept, options=flat)
        assert train(other, others, 2, 2) == wanted, kind


def test_torchs_models_go_on_from_ours(tmp_path):
    run_ranks(torchs_go_on_from_ours, 2, tmp_path)


def files_of_state_dicts(folder, use_orig_params):
    """Full and local state dicts go through ``torch.save`` into torch's FSDP1 and back."""
    classes = {"ours": FSDP, "theirs": TorchFSDP}
    settings: dict = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
    kinds = [StateDictType.FULL_STATE_DICT] + [StateDictType.LOCAL_STATE_DICT] * (not use_orig_params)
    for (source, cls), kind in itertools.product(classes.items(), kinds):
        is_full = kind is StateDictType.FULL_STATE_DICT
        # of original parameters on a CPU torch's full_optim_state_dict has exp_avg_sq's values in exp_avg too
        with_optimizer = is_full and (cls is FSDP or not use_orig_params)
        model = wrap_blocks(make(), cls, **settings)
        optimizer = adam(model)
        train(model, optimizer, 0, 2)
        with cls.state_dict_type(model, kind):
            both = {"model": model.state_dict()}
        if with_optimizer:
            both["optim"] = cls.full_optim_state_dict(model, optimizer, rank0_only=False)
        path = folder / f"{source}-{kind.name}-{dist.get_rank()}.pt"
        torch.save(both, path)
        wanted = train(model, optimizer, 2, 2 if with_optimizer else 1)
        for other_cls in classes.values():
            other = wrap_blocks(make(seed=9), other_cls, **settings)
            others = adam(other)
            found = torch.load(path, weights_only=is_full)
            with other_cls.state_dict_type(other, kind):
                other.load_state_dict(found["model"])
            if with_optimizer:
                others.load_state_dict(other_cls.shard_full_optim_state_dict(found["optim"], other, optim=others))
            assert train(other, others, 2, len(wanted)) == wanted, (source, other_cls)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_files_of_state_dicts(tmp_path, use_orig_params):
    run_ranks(files_of_state_dicts, 2, tmp_path, use_orig_params)


def torch_is_read(folder):
    mesh = init_device_mesh("cpu", (2,))
    for kind in ("fsdp1", "fsdp2"):
        model = torchs(kind, mesh, seed=0)
        optimizer = adam(model)
        train(model, optimizer, 0, 2)
        whole = make()
        whole_optimizer = adam(whole)
        states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=False))
        full = [{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in states[0].items()}, states[1]]
        set_state_dict(whole, whole_optimizer, model_state_dict=full[0], optim_state_dict=full[1])
        wanted = named_state(whole, whole_optimizer)

        both = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.save(both, checkpoint_id=str(folder / kind))
        files = get_model_state_dict(model)
        dcp.save(files, storage_writer=HuggingFaceStorageWriter(str(folder / f"{kind}-hf"), save_distributed=True))
        for strategy in ("FULL_SHARD", "ZERO_1"):
            ours = wrapped(strategy, seed=4, cls=Model)
            our_optimizer = adam(ours)
            our_optimizer.param_groups[0]["lr"] = 3.0
            before = full_state(ours, our_optimizer)
            with pytest.raises(CheckpointError, match="pass trusted=True"):
                checkpoint.load(folder / kind, ours, our_optimizer)
            assert not differing(full_state(ours, our_optimizer), before)
            checkpoint.load(folder / kind, ours, our_optimizer, trusted=True)
            assert not differing(full_state(ours, our_optimizer), wanted), kind
            assert our_optimizer.param_groups[0]["lr"] == 0.01
            ours = wrapped(strategy, seed=4, cls=Model)
            checkpoint.load(folder / f"{kind}-hf", ours)
            model_only = {name: value for name, value in wanted.items() if " of " not in name}
            assert not differing(full_state(ours), model_only), kind


def test_ours_reads_torchs(tmp_path):
    run_ranks(torch_is_read, 2, tmp_path)


class Counting(torch.optim.Optimizer):
    """Keeps its number of steps as a plain int, and sums of gradients in a list if there is one."""

    def __init__(self, params, listed=False):
        super().__init__(params, {"lr": 0.1})
        self.listed = listed

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state.setdefault("step", 0)
            total = state.setdefault("sums" if self.listed else "sum", torch.zeros_like(param))
            total = total[0] if isinstance(total, list) else total
            state["step"] += 1
            total.add_(param.grad)
            param.sub_(total / state["step"], alpha=0.1)
            if self.listed:
                state["sums"] = [total]


@pytest.fixture
def world():
    with fake_world():
        yield


def save_by_torch(path, model, optimizer, options=None):
    states = get_optimizer_state_dict(model, optimizer, options=options)
    of_others = {"state": {"loop": {"epoch": {"n": 3}, "batch": 4}}}
    both = {"model": model.state_dict(), "optim": states}
    dcp.save({**both, "trainer": of_others}, checkpoint_id=str(path), no_dist=True)


@pytest.mark.parametrize("flat", [False, True])
def test_states_that_are_no_tensors_are_read_from_torchs_files(world, tmp_path, flat):
    model, again = make(), make()
    optimizer, of_again = Counting(model.parameters()), Counting(again.parameters())
    train(model, optimizer, 0, 3)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    save_by_torch(tmp_path / "one", model, optimizer, options)
    checkpoint.load(tmp_path / "one", again, of_again, trusted=True)
    train(model, optimizer, 3, 6)
    train(again, of_again, 3, 6)
    assert of_again.state[again.first.weight]["step"] == 9
    assert not differing(dict(again.named_parameters()), dict(model.named_parameters()))


def test_states_in_containers_of_torchs_files_are_refused_by_name(world, tmp_path):
    model = make()
    optimizer = Counting(model.parameters(), listed=True)
    train(model, optimizer, 0, 1)
    save_by_torch(tmp_path / "one", model, optimizer)
    again = make()
    with pytest.raises(CheckpointError, match=r"`optim\.state\..*\.sums\.0` is in a list or dict"):
        checkpoint.load(tmp_path / "one", again, Counting(again.parameters()), trusted=True)
    checkpoint.load(tmp_path / "one", again, trusted=True)
    assert not differing(dict(again.named_parameters()), dict(model.named_parameters()))


def command(*arguments, terminal=False):
    """The status, output and errors of a command. In this process: a fresh one imports torch for seconds."""
    out, err = io.StringIO(), io.StringIO()
    err.isatty = lambda: terminal
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main([str(argument) for argument in arguments])
        except SystemExit as ended:
            status = ended.code
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(("terminal", "options"), [(True, []), (True, ["--quiet"]), (False, [])])
def test_export_shows_its_bar_on_a_terminal_alone(tmp_path, terminal, options):
    save_file({"weight": torch.arange(6.0)}, tmp_path / "in.safetensors")
    status, _, err = command(
        "export", tmp_path / "in.safetensors", tmp_path / "out.safetensors", *options, terminal=terminal
    )
    assert (status, bool(err)) == (0, terminal and not options), err


def test_a_file_to_write_that_cannot_be_is_bad_input(tmp_path):
    save_file({"weight": torch.ones(3)}, tmp_path / "in.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    for name, said in (
        ("out", "expected a name that ends in .safetensors, got out"),
        ("none/out.safetensors", "there is no such folder; make it first"),
        ("folder.safetensors", "is a folder; name a file in it"),
    ):
        status, out, err = command("export", tmp_path / "in.safetensors", tmp_path / name)
        assert (status, out) == (2, "")
        assert said in err
        assert len(err.splitlines()) == 1
    assert command("export", tmp_path / "none", tmp_path / "out.safetensors")[0] == 1  # no checkpoint


def test_help_shows_each_default_once():
    status, out, _ = command("export", "--help")
    assert status == 0
    assert out.count("(default: one)") == 1


def saved_by_two(folder):
    model = wrapped("FULL_SHARD")
    optimizer = adam(model)
    train(model, optimizer, 0, 1)
    checkpoint.save(folder / "one", model, optimizer)
    return {name: value.tolist() for name, value in full_state(model).items()}


def test_commands_show_verify_and_export(tmp_path):
    wanted, _ = run_ranks(saved_by_two, 2, tmp_path)
    status, out, _ = command("show", tmp_path / "one")
    assert status == 0
    assert "saved by 2 ranks" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["optimizer", "torch.optim.AdamW,", "1", "group", "of", "parameters"] in lines
    blocks = [name for name, _ in Odd().blocks.named_children()]
    assert any(
        line[:5] == [f"blocks.{{0..{len(blocks) - 1}}}", str(len(blocks)), "FULL_SHARD", "2", "1"] for line in lines
    )
    assert any(line[:5] == ["(root)", "1", "FULL_SHARD", "2", "1"] for line in lines)
    assert any(line[:8] == ["model", "image", "1", "F32", "[3,", "4,", "2,", "5]"] for line in lines)
    state = Odd().state_dict()
    equal = [name for name in state if name.startswith("blocks.") and name.endswith(".inner.weight")]
    (row,) = [line for line in lines if line[:2] == ["model", f"blocks.{{0..{len(equal) - 1}}}.inner.weight"]]
    shape = list(state[equal[0]].shape)
    assert row[2:6] == [str(len(equal)), "F32", f"[{shape[0]},", f"{shape[1]}]"]
    status, everything, _ = command("show", tmp_path / "one", "--all")
    rows = [line.split() for line in everything.splitlines()]
    assert {row[1] for row in rows if row[:1] == ["model"]} == state.keys()
    units = {row[0] for row in rows if row[1:3] == ["1", "FULL_SHARD"]}
    assert units == {"(root)", *(f"blocks.{name}" for name in blocks)}
    status, out, _ = command("verify", tmp_path / "one", "--finite")
    assert (status, "as it was saved" in out) == (0, True)
    status, out, err = command("export", tmp_path / "one", tmp_path / "whole.safetensors", "--quiet", "--tied", "all")
    assert (status, err) == (0, "")
    status, out, _ = command("verify", tmp_path / "whole.safetensors")
    read = sum(tensor.nbytes for tensor in load_file(tmp_path / "whole.safetensors").values())
    assert (status, "as it was saved" in out, "it has no checksums" in out) == (0, False, True)
    assert checkpoint.verify(tmp_path / "whole.safetensors").bytes == read
    module = Odd()
    module.load_state_dict(load_file(tmp_path / "whole.safetensors"))
    for name, value in wanted.items():
        assert module.state_dict()[name].tolist() == value, name
    torch.manual_seed(8)
    again = Odd()
    checkpoint.load(tmp_path / "whole.safetensors", again)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), module.parameters(), strict=True))
    damaged = tmp_path / "one" / "optimizer" / "shard-00002-model-00001.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    (tmp_path / "ends").mkdir()
    [done] = forked_scripts.run(
        [(forked_scripts.as_main("flatparam"), ["checkpoint", "verify", str(tmp_path / "one")])], tmp_path / "ends"
    )
    assert done.status == 1
    assert f"{damaged}: is damaged" in done.err
    assert command("show", tmp_path / "nowhere")[0] == 1
    assert command("look")[0] == 2


def test_show_sorts_by_name_and_has_sizes_in_mib(tmp_path):
    names = ("b.10.w", "z", "b.2.w", "a.w", "b.2.v")
    save_file({name: torch.ones(2**17 + i) for i, name in enumerate(names)}, tmp_path / "one.safetensors")
    _, out, _ = command("show", tmp_path / "one.safetensors", "--all")
    rows = [line.split() for line in out.splitlines()]
    found = [(row[1], row[-3]) for row in rows if row[:1] == ["model"]]
    assert [name for name, _ in found] == ["a.w", "b.2.v", "b.2.w", "b.10.w", "z"]
    sizes = {name: 4 * (2**17 + i) for i, name in enumerate(names)}
    assert found == [(name, f"{sizes[name] / 2**20:.3f}") for name, _ in found]
    assert rows[-1] == ["total", "5", f"{sum(sizes.values()) / 2**20:.3f}", "5", "1"]
    assert [row[-3] for row in rows if row[:1] == ["tensors"]] == ["MiB"]


def test_commands_name_their_own_options(tmp_path):
    (tmp_path / ".metadata").touch()
    status, _, err = command("show", tmp_path)
    assert (status, "pass --trusted if you trust its author" in err) == (1, True)
