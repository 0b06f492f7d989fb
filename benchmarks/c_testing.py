"""``flatparam._C_testing``: what only tests and benchmarks ask of the C core, where `make build` has built it."""

from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec

from flatparam import _C

_loader = ExtensionFileLoader("flatparam._C_testing", _C.__file__)
_C_testing = module_from_spec(ModuleSpec(_loader.name, _loader, origin=_C.__file__))
_loader.exec_module(_C_testing)
