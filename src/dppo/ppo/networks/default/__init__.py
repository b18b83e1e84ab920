"""The default network: two multilayer perceptrons, in NumPy and in torch."""
