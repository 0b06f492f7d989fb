"""Mechanisms that the drop-in, the runtime and LayerZero share. Nothing here imports those three."""
