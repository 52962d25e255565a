"""Readers of checkpoint files: GGUF and safetensors.

They check everything about a file's header before any value of it is used, memory-map the data, and hand out
`Weight`s under the names that the file uses. Only `models` calls them. They never know of architectures, and they
never unpickle.
"""
