"""Replace or refuse functions of torch and other libraries that would take a shard for a whole parameter.

This room knows units, and no wrapper. A replaced function does the same as before for models that are not ours.
"""
