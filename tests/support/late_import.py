"""Call a function of a module that a child of multiprocessing imports only then, when its ``run()`` has begun."""

import importlib


def call(module, function, *arguments):
    getattr(importlib.import_module(module), function)(*arguments)
