"""Devices: a pool of slots for blocks, a link that fills them, a processor that reads them."""
