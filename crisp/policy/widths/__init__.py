"""Width policies: how many leading blocks of each routed expert a token executes."""
