"""Action distributions: pure functions of the network's head, in NumPy for actors and in torch for trainers.

Noise is passed in, so that an action is a pure function of the head and the noise. Written by hand, because
`torch.distributions` costs as much as a small network; tested against it.
"""
