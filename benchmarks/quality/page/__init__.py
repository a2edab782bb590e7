"""docs/quality.md: its sections, tables, pictures and claims, made of docs/quality.json."""
