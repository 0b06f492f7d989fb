"""One flat parameter: its original parameters, its layout, and the groups over which it is sharded."""
