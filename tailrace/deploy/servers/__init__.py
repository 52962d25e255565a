"""Servers for engines that have none, as scripts that run in the engine's interpreter and import nothing of ours.

They have a folder of their own, since a script's folder is where its interpreter looks for modules first.
"""
