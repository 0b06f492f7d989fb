"""``elastic.resize`` reads boxes in the memory of ranks on the same machine; oracle: the same calls, and all is sent.

Promises:
- parameters, states and `Resized.sent` are the same, bit for bit, where all ranks can read, none, or all but one; ranks
  that can read send nothing: `test_each_way_gives_the_same`
- boxes that are no run in memory, here or there, or of another dtype, are sent: `test_what_is_no_run_is_sent`
- a rank that is killed as others read its memory: they raise an error that names it, and hold what they held:
  `test_a_rank_that_is_killed_as_it_is_read`
- a rank that leaves by Ctrl-C after it has agreed: nobody takes what its memory holds then:
  `test_a_rank_that_leaves_as_it_is_read`
- another process, or memory whose word is gone, is not read; runs of any number and size are:
  `test_read_finds_the_word`, `test_read_process`
"""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from gloo import ends_of_ranks, meet_in_a_server, note, run_ranks, say, wait_until_said
from test_resize import OPTIMIZERS, built, everything, same, steps

from flatparam import _C, elastic
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.checkpoint import CheckpointError
from flatparam.checkpoint.rendezvous import Rendezvous
from flatparam.elastic import peers
from flatparam.fsdp.errors import OrderError

pytestmark = [pytest.mark.multiprocess, pytest.mark.skipif("sys.platform != 'linux'", reason="others cannot read")]
GONE = "rank 1 has ended, or has left the call, as its memory was read"


def counting(can_read):
    """Replace ``peers.read``. Returns: the bytes of each read that follows."""
    working, counts = _WORKING, []

    def read(shown, runs=()):
        if runs:
            counts.append(sum(out.nbytes for out, _ in runs))
        return can_read and working(shown, runs)

    peers.read = read
    return counts


_WORKING = peers.read


def each_way():
    found = []
    for spared in ([], [0, 1, 2], [1]):  # ranks that cannot read
        counts = counting(dist.get_rank() not in spared)
        model = built("FULL_SHARD", False)
        optimizer = OPTIMIZERS["adam"](model.parameters())
        steps(model, optimizer, dist.get_rank(), 0, 2)
        sent = [elastic.resize(model, optimizer, ranks).sent for ranks in ([0, 1], [1, 2], [0, 1, 2])]
        found.append((everything(model, optimizer), sent, sum(counts)))
    for values, sent, _ in found[1:]:
        same(values, found[0][0])
        assert sent == found[0][1]
    return sum(found[0][1]), [count for *_, count in found]


def test_each_way_gives_the_same():
    sent, read = zip(*run_ranks(each_way, 3), strict=True)
    direct, refused, mixed = zip(*read, strict=True)
    assert sum(direct) == sum(sent) > 0
    assert refused == (0, 0, 0)
    assert mixed == (direct[0], 0, direct[2])
    assert direct[1] > 0


def odd_buffers():
    rank = dist.get_rank()
    counts = counting(True)
    model = FSDP(torch.nn.Linear(3, 4))
    values = torch.arange(12.0).view(3, 4) + 100 * rank
    model.module.register_buffer("there", values.t() if rank == 0 else values.t().contiguous())
    model.module.register_buffer("here", values.clone() if rank == 0 else values.t().contiguous().t())
    model.module.register_buffer("wider", values.double() if rank == 0 else values.clone())
    model.module.register_buffer("run", values.clone())
    elastic.resize(model, None, [0, 1])
    for name, expected in ("there", values.t()), ("here", values), ("wider", values), ("run", values):
        assert torch.equal(getattr(model.module, name), expected - 100 * min(rank, 1) if rank < 2 else expected), name
    return sum(counts)


def test_what_is_no_run_is_sent():
    assert run_ranks(odd_buffers, 3) == [4 * 2, 4 * 4 + 4 * 12, 0]  # elements of the shards, and the last buffer


def killed():
    meet_in_a_server()
    model = built("FULL_SHARD", False)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    steps(model, optimizer, dist.get_rank(), 0, 2)
    before = everything(model, optimizer)
    processes = [None] * 3
    dist.all_gather_object(processes, os.getpid())

    def read(shown, runs=()):
        if runs and shown.process == processes[1]:
            os.kill(shown.process, signal.SIGKILL)
            while _WORKING(shown):
                pass
        return _WORKING(shown, runs)

    peers.read = read
    with pytest.raises((CheckpointError, OrderError), match="rank 1 has"):
        elastic.resize(model, optimizer, [0, 2])
    same(everything(model, optimizer), before)
    note("as before")
    os._exit(3)


def test_a_rank_that_is_killed_as_it_is_read():
    ends = ends_of_ranks(killed, 3, timeout=60.0)
    assert [code for code, *_ in ends] == [3, -signal.SIGKILL, 3], ends
    assert [said for *_, said in ends[::2]] == ["as before"] * 2


def left():
    model = built("FULL_SHARD", False)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    steps(model, optimizer, dist.get_rank(), 0, 2)
    before = everything(model, optimizer)
    agree = Rendezvous.agree

    def leave(self, work, decide, *, is_last=False):
        def interrupt(*_):
            raise KeyboardInterrupt

        if is_last:
            self._wait_for = interrupt  # for the others, once it has said that all went well here
        return agree(self, work, decide, is_last=is_last)

    def read(shown, runs=()):
        if runs:
            wait_until_said("left")
        return _WORKING(shown, runs)

    if dist.get_rank() == 1:
        words = [peers.new_word()]  # it lives on: others do not miss it by chance, as its memory is used again
        peers.new_word = lambda: words[0]
        Rendezvous.agree = leave
        with pytest.raises(KeyboardInterrupt):
            elastic.resize(model, optimizer, [0, 2])
        say("left")
    else:
        peers.read = read
        with pytest.raises(CheckpointError, match=GONE):
            elastic.resize(model, optimizer, [0, 2])
    same(everything(model, optimizer), before)


def test_a_rank_that_leaves_as_it_is_read():
    run_ranks(left, 3)


def test_read_finds_the_word():
    word, source, out = peers.new_word(), torch.arange(10), torch.zeros(10, dtype=torch.int64)
    shown = peers.show({}, word)
    assert peers.read(shown)
    assert peers.read(shown, [(out, source.data_ptr())])
    assert torch.equal(out, source)
    assert not peers.read(shown._replace(process=2**30))
    assert not peers.read(shown._replace(process=os.getppid()))
    assert not peers.read(shown, [(out, 8)])
    word.zero_()
    assert not peers.read(shown, [(out, source.data_ptr())])


def test_read_process():
    source, out = torch.randn(100_000), torch.zeros(100_000)
    runs, at = [], 0
    for i in range(300):
        runs += [out.data_ptr() + at, source.data_ptr() + at, 4 * (i % 7) ** 3]
        at += runs[-1]
    _C.read_process(os.getpid(), runs)
    assert torch.equal(out[: at // 4], source[: at // 4])
    assert not out[at // 4 :].any()
    for wrong in ([1, 2], [1, 2, -1]):
        with pytest.raises(ValueError, match=f"expected three numbers for each run, and bytes >= 0, got {len(wrong)}"):
            _C.read_process(os.getpid(), wrong)
    for process in (0, -1, 2**40):
        with pytest.raises(ProcessLookupError):
            _C.read_process(process, [])
    with pytest.raises(OSError, match="Bad address"):
        _C.read_process(os.getpid(), [out.data_ptr(), 8, 8])
