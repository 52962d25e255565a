"""Engines side by side: each is started, measured in turns with the others, and judged by what was measured.

`turns` starts and measures, `judge` compares and decides. An engine is what its driver in `deploy.engines` says of it;
nothing here knows one by name.
"""
