"""The report of `crisp report`: runs as a table, their conditions, and a page that draws them.

Everything is pure: from runs, tables and timelines to text. The page is one self-contained file.
"""
