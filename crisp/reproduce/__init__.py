"""The CRISP paper (arXiv:2610.37442), claim by claim: what it prints, what we find, and why."""
