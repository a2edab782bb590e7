"""Caches, prefetchers and orders beside each other: docs/caches.md."""
