"""Commands of ``python -m flatparam`` that have no folder of their own."""
