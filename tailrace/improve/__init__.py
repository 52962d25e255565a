"""What makes a model cheaper to serve, and what that costs in quality: measured, not assumed.

`text`: real text to measure with. `compare`: one model kept in several ways. `kv`: KV that takes fewer bits.
`weights`: weights in other formats. Called by `cli`; may use every room below it, and
knows nothing of HTTP or of how results are shown.
"""
