"""The words between a training process and the small process that starts it (``__main__.py``). Imports nothing."""

MEMBER = "FLATPARAM_ELASTIC_MEMBER"  # environment variable: the training process's name as a member, "slot.life"
REPLACED = 76  # exit status of a training process that others took for lost
