"""Measurements of this project on this machine. `make bench` runs them; docs/performance.md quotes them."""
