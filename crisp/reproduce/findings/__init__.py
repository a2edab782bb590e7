"""The findings: for every claim the figures found here, and where they come from."""
