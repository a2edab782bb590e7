"""What is found of each of the paper's claims."""
