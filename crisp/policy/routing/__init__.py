"""Routing rules: which experts a token uses, given what is resident; and how those are weighed."""
