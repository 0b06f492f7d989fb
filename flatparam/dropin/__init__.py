"""The handle of torch's FSDP on flatparam's C core, and putting it in torch's place."""
