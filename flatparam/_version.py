"""The version: pyproject.toml reads it here, so that there is one. Imports nothing."""

__version__ = "0.1.0"
