"""Python imports this at its start, in every process that the runner or a test starts, because the runner puts this
folder on PYTHONPATH: so each of them gets the shim, before it imports torch."""

import os

if os.environ.get("UPSTREAM_SHIM") == "1":
    import upstream_shim

    upstream_shim.activate()
