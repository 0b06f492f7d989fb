"""Names of modules and parameters, and the parts of them that wrappers add."""

FSDP_WRAPPED_MODULE = "_fsdp_wrapped_module"
FSDP_PREFIX = FSDP_WRAPPED_MODULE + "."
_CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."


def clean_tensor_name(name: str) -> str:
    """``name`` as the unwrapped model has it."""
    return name.replace(FSDP_PREFIX, "").replace(_CHECKPOINT_PREFIX, "")


def without_units(name: str) -> str:
    """``name`` without the parts that units add to it; those of checkpoint wrappers stay."""
    return name.replace(FSDP_PREFIX, "")
