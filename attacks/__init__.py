"""Attacks on Quell's promises: `make attack` runs all of them and writes attacks/results.md (see attacks/README.md)."""
