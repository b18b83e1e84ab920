"""Hand-written fast paths. Each has a plain twin, and `tests/ppo/test_kernels.py` compares the two.

`benchmarks/kernels.py` measures what each is worth in an update or an iteration. A kernel stays if it saves at least
5 % of one, or if results need it: `products` and `linear_layers` give equal last bits on all CPUs (see
`dppo.numerics`), and acting needs no torch with `acting`.

    kernel          in place of                                     plain twin
    products        torch.mm                                        torch.mm
    linear_layers   nn.Linear, and nn.Sequential of linear layers   the same modules
    mlp             autograd through the default network            `Autograd` of `networks.mlp.MLP`
    recurrence      a loop over nn.GRUCell or nn.LSTMCell           the cell, step by step
    convolutions    nn.Conv2d over pixels                           nn.Conv2d over pixels / 255
    calls           nn.Module.__call__                              the module as it is
    acting          the default networks in torch                   the same networks in torch
    scores          autograd through a distribution's scores        `Distribution.evaluate`
"""
