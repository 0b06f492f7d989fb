"""Programs that use flatparam."""
