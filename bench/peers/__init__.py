"""Other engines that ship no OpenAI server of their own, behind the thinnest one that the load generator can talk to.

Each is a script for that engine's own environment; nothing here imports Tailrace.
"""
