"""What happened to every request: folds over the event stream, and the line a request leaves in the log.

Called by `api` and whatever stands above it. Knows events and phases; never HTTP, tokens' text, or how the engine
decides.
"""
