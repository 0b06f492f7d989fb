"""``python -m flatparam advise``: find the strategies, units, inner groups and micro-batches that fit, and the fastest.

Memory is the plan of ``inspect``. ``flatparam.advise.traffic`` computes the bytes that ranks send, and
``flatparam.advise.timing`` the time of a step. No model is run.
"""
