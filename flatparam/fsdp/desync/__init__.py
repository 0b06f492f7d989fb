"""Messages between the ranks of a group: the collectives they issue, the units they build, the processes that end."""
