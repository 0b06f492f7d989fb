"""The demo: one language model trained three ways on the same batches, compared bit for bit; then killed, and resumed.

From the bottom up: ``config`` (settings), ``data`` and ``model`` (what is trained), ``train`` (a step, unsharded and
sharded), ``memory``, ``checkpoint`` and ``hostcost`` (what is measured and saved), ``worker`` (one process),
``processes`` (all of them, from the parent), ``experiment`` (the order of events), ``report`` and ``plot`` (what comes
out), ``cli`` (options and exit status). ``scripts`` runs the other examples.
"""
