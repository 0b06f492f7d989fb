"""What the drop-in, the runtime and LayerZero share."""
