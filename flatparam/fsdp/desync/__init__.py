"""What the ranks of a group tell each other: their collectives, what they build, and whether they live."""
