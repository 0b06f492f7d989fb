"""What flatparam costs and what its peers cost, side by side. ``python -m benchmarks --help``; docs/performance.md."""
