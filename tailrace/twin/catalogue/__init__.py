"""Devices and prices as data: `devices.toml` and `prices.toml`, each value with its unit, its source and the day that
it was read; `devices` and `prices` read and check them, and what a user says in a file of their own.

Nothing here works out anything. A value that is not known is absent, never a guess.
"""
