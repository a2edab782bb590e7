"""What widths cost in quality, measured on the small models of this project; see __main__.py."""
