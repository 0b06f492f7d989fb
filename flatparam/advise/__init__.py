"""``python -m flatparam advise``: which strategy, units, inner groups and micro-batches fit, and the fastest of them.

Memory is the plan of ``inspect``; what is sent and how long it takes is computed, see ``flatparam.advise.traffic`` and
``flatparam.advise.timing``. Nothing is run.
"""
