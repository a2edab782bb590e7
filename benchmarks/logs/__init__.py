"""docs/logs.md: an engine's published figures reproduced from its own logs, and their diagnosis."""
