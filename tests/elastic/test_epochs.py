"""The epochs of an elastic job, on a store in memory.

Promises:
- a member that comes late is waited for as long as the heartbeat says, and for ever where that is 0:
  `test_a_late_member_is_waited_for`
"""

import threading
import time

import pytest

from flatparam.elastic import epochs
from flatparam.elastic.epochs import Epoch, Epochs
from flatparam.fsdp.desync.stores import in_memory


@pytest.mark.parametrize(("beat", "members"), [("0", ["0.0", "1.0"]), ("0.01", ["0.0"])])
def test_a_late_member_is_waited_for(monkeypatch, beat, members):
    monkeypatch.setenv("FLATPARAM_HEARTBEAT", beat)
    monkeypatch.setattr(epochs, "PATIENCE", 0.01)
    store = in_memory()
    store.set("flatparam elastic/epoch/1", '[["0.0", "1.0"], 0, ""]')

    def come_late():
        time.sleep(0.5)
        store.set("flatparam elastic/here/1/1.0", "")

    late = threading.Thread(target=come_late)
    late.start()
    try:
        found = Epochs(store, "0.0").meet(Epoch(1, ["0.0", "1.0"]))
    finally:
        late.join()
    assert found.members == members
