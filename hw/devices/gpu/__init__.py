"""The devices of GPUs: behind PCIe (cuda), or sharing the processor's memory (unified)."""
