"""What `crisp report` shows: runs as a table, their conditions, and a page that draws them.

Pure: from runs, tables and timelines to text. The page needs nothing but itself.
"""
