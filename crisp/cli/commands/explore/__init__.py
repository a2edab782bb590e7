"""Commands that simulate, and that look at what was simulated or measured."""
