"""A batch of zeros, used to time an update."""

from __future__ import annotations

import torch

from dppo.ppo.learning.batch import Batch
from dppo.ppo.networks.network import NetworkSpec
from dppo.ppo.networks.recall import Recall


def zero_batch(spec: NetworkSpec, sequences: int, length: int) -> Batch:
    """Return `sequences` sequences of `length` rows of zeros."""
    rows, distribution, dtype = sequences * length, spec.distribution, getattr(torch, spec.dtype)
    actions = torch.zeros(
        (rows, *distribution.action_shape), dtype=getattr(torch, distribution.action_dtype(spec.dtype))
    )
    zeros = torch.zeros(rows, dtype=dtype)
    recall = None
    if spec.state_size:
        states = torch.zeros((sequences, spec.state_size), dtype=dtype)
        recall = Recall(states, torch.zeros((sequences, length), dtype=torch.bool))
    return Batch(spec.zeros(rows), actions, zeros, zeros, zeros, zeros, length=length, recall=recall)
