"""C++ kernels behind `backends.cpu`; nothing else may import them."""
