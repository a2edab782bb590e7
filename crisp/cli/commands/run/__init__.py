"""Commands that run on this machine's own hardware."""
