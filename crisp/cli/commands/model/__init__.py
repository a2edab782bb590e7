"""Commands that read a real model or its routing."""
