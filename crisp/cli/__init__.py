"""The command line: the only part of crisp that drives the simulator and talks to a terminal."""
