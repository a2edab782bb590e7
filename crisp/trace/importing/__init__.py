"""Import of long tables (one row per token and layer) that other tools have written."""
