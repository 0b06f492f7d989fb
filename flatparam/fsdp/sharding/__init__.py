"""One flat parameter: its original parameters, its layout, and the process groups over which it is sharded."""
