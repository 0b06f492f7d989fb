"""Imported last by the fork server: the ranks' collections leave out what it has imported, and so copy no memory."""

import gc

from flatparam.common.torch_private import leave_out_of_graphs

leave_out_of_graphs()  # as each rank would do for its first wrapped model, in 10 ms
gc.collect()
gc.freeze()
