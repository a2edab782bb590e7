"""What a run can do without: imports, and computing with tensors that have no memory."""
