"""Policies over many replicas: which of them a request goes to. Pure: views of the replicas in, a choice out.

Run by whoever has a fleet: a gateway, and the simulator. Nothing here knows how a view was come by, and nothing looks
at a clock or does anything. Imports nothing but `terms`.
"""
