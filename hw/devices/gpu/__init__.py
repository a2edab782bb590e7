"""The GPU devices: behind PCIe (cuda), or sharing the processor's memory (unified)."""
