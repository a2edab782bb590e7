"""The SimPy model of link and compute, and the hardware profiles it runs on."""
