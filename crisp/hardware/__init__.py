"""Hardware profiles: the numbers of a machine, the cost of operations on it, and energy."""
