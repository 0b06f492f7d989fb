"""What a process may do beside its training, on one rank alone."""

import contextlib
import threading

import torch
from torch import nn


@contextlib.contextmanager
def stepping_in_a_thread(random):
    """Let a thread step an optimizer of a module that nobody trains, after pauses of up to 1 ms by ``random``."""
    over = threading.Event()

    def run():
        probe = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
        while not over.wait(0.001 * random.random()):
            probe.weight.grad = torch.ones_like(probe.weight)
            optimizer.step()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
