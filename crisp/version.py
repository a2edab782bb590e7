"""The version of the program."""

__version__ = "0.1.0"
TOOL = f"crisp-moe {__version__}"  # as it signs the files it writes
