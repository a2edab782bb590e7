"""Quality of widths, measured on the small models of this project; see __main__.py."""
