"""One unit: its flat parameters, the user's writes to them, and computations over its shards.

A unit does not know the tree of units, the arguments of the wrapper's constructor, or files.
"""
