"""The module that users see: how it is built, what its forward does, and the names of torch's class on it."""
