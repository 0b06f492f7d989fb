"""Change the ranks that hold a model, in the middle of training: ``resize``."""

from .resizing import Resized, resize

__all__ = ["Resized", "resize"]
