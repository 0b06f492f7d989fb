"""The module that users see: its constructor, its forward, and the names of torch's class on it.

The wrapper knows all rooms below: it builds the units of a module and joins them to one ``_C.Root``.
"""
