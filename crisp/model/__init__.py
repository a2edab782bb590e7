"""The geometry of a Mixture-of-Experts model: layers, experts, sizes in bytes."""
