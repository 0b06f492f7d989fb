"""Ways in which others take the memory of a tensor and go on using it, and the values that they find there."""

import ctypes
import os

import numpy as np
import torch
import torch.utils.dlpack

_EXPORTS_OF_C, _CAPSULE = b"dlpack_exchange_api", b"dltensor_versioned"


def by_c(weight):
    """As a library in C does: torch's table of functions, of which the second exports a tensor."""
    ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
    ctypes.pythonapi.PyCapsule_New.restype = ctypes.py_object
    table = ctypes.pythonapi.PyCapsule_GetPointer(
        ctypes.py_object(torch.Tensor.__dlpack_c_exchange_api__), _EXPORTS_OF_C
    )
    function = ctypes.c_void_p.from_address(table + 24).value  # after two numbers and two pointers
    exported = ctypes.c_void_p()
    export = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))(function)
    assert export(weight.detach(), ctypes.byref(exported)) == 0
    return torch.from_dlpack(ctypes.pythonapi.PyCapsule_New(exported, _CAPSULE, None))


def shared(weight):
    """In memory that other processes may have too. torch moves it there, and frees what others had of it before."""
    return weight.detach().share_memory_().numpy()


def in_a_file(weight):
    """As queues of torch.multiprocessing hand it to other processes: another mapping of the memory it is moved to."""
    descriptor, size = weight.detach().untyped_storage()._share_fd_cpu_()[:2]
    return torch.UntypedStorage._new_shared_fd_cpu(os.dup(descriptor), size)


WAYS = {
    "NumPy": lambda weight: weight.detach().numpy(),
    "NumPy by DLPack": lambda weight: np.from_dlpack(weight.detach()),
    "torch by DLPack": lambda weight: torch.from_dlpack(weight.detach()),
    "as long ago": lambda weight: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(weight.detach())),
    "by torch's name": lambda weight: torch.from_dlpack(torch.to_dlpack(weight.detach())),
    "not read yet": lambda weight: weight.detach().__dlpack__(max_version=(1, 0)),
    "by C": by_c,
    "shared": shared,
    "in a file": in_a_file,
    "storage": lambda weight: weight.untyped_storage(),
}
BY_ADDRESS = tuple(WAYS)[:7]


def values(taken):
    """A copy of the values in what was taken."""
    if isinstance(taken, torch.UntypedStorage):
        taken = torch.empty(0).set_(taken)
    return taken.numpy().copy() if isinstance(taken, torch.Tensor) else taken.copy()


class Taking:
    """Takes the memory of every weight in every forward of ``model``'s linear modules, by each of ``ways`` in turn."""

    def __init__(self, model, ways):
        self.ways = [WAYS[way] for way in ways]
        self.taken, self.values, self.on = [], [], True
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(self)

    def __call__(self, module, args, output):
        if self.on:
            way = self.ways[len(self.taken) % len(self.ways)]
            self.values.append(values(module.weight.detach()))
            self.taken.append(way(module.weight))

    def check(self):
        assert self.taken
        for i, (taken, expected) in enumerate(zip(self.taken, self.values, strict=True)):
            if type(taken).__name__ == "PyCapsule":
                taken = self.taken[i] = torch.from_dlpack(taken)
            found = values(taken)
            if isinstance(taken, torch.UntypedStorage):  # which has the other weights of the unit too
                assert expected.tobytes() in found.tobytes(), i
            else:
                assert (found == expected).all(), i
