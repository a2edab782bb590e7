"""Devices: slots for blocks, a link that fills them and a processor that computes from them."""
