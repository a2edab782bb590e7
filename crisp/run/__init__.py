"""From files to a run: inputs, cases, and what a simulation or a measurement returns."""
