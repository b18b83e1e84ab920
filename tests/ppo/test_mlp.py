"""The initial weights of the default network, and weights of another one."""

from __future__ import annotations

import numpy as np
import pytest
from builders import random_weights, spec_of


def test_weights_of_another_network_are_refused() -> None:
    spec = spec_of()
    with pytest.raises(ValueError, match=r"got 1,00\d weights, this network has"):
        spec.unflatten(np.zeros(1003))
    named = spec.unflatten(random_weights(spec))
    with pytest.raises(ValueError, match=r"value\.4\.bias has shape None, this network has \(1,\)"):
        spec.flatten({name: array for name, array in named.items() if name != "value.4.bias"})
    with pytest.raises(ValueError, match=r"log_std has shape \(2,\), this network has None"):
        spec.flatten(named | {"log_std": np.zeros(2)})
    with pytest.raises(ValueError, match=r"policy\.0\.weight has shape \(4, 16\)"):
        spec.flatten(named | {"policy.0.weight": named["policy.0.weight"].T})
