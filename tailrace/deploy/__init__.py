"""How servers of any engine are started, watched and stopped on this machine.

`engines` has a file for each engine: how it is found, what its command line is, when it is ready, what its gauges are
called. `local` runs such a command and sees to it that nothing of it is left; `processes` says what a tree of processes
takes.

Called by `measure` and `cli`, which measure what runs here over HTTP. Knows engines by their command lines alone: it
imports none, and never looks into what they answer beyond their health.
"""
