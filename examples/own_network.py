"""Train a network of your own on CartPole: python own_network.py [STEPS]."""

import sys

from torch import Tensor, nn

import dppo


class Residual(nn.Module):
    """One body of residual blocks for both policy and value."""

    def __init__(
        self, spaces: dppo.Spaces, head_size: int, units: int = 64, blocks: int = 2
    ) -> None:
        """Make the layers; `dppo` calls this with the environment's spaces, and with Config's model_kwargs."""
        super().__init__()
        self.first = nn.Linear(spaces.obs.shape[0], units)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(units), nn.Linear(units, units)) for _ in range(blocks)
        )
        self.head = nn.Linear(units, head_size)
        self.value = nn.Linear(units, 1)
        nn.init.orthogonal_(self.head.weight, 0.01)  # at first, all actions are about as likely

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the head [n, head_size] and the values [n] of observations [n, 4]."""
        hidden = self.first(obs)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return self.head(hidden), self.value(hidden).squeeze(-1)


if __name__ == "__main__":
    config = dppo.Config.preset(
        "CartPole-v1",
        total_timesteps=int(sys.argv[1]) if len(sys.argv) > 1 else 40_000,
        model=Residual,  # from the command line: --model own_network:Residual --model-kwargs '{"units": 32}'
        model_kwargs={"units": 32},
    )
    result = dppo.train(config)
    policy = dppo.load_policy(result.run_dir)  # in another program: model=Residual, or trust=True
    print(f"The likeliest action in the middle: {policy.act([0.0, 0.0, 0.0, 0.0])}")
    print(f"Mean return after {result.global_step:,} steps: {result.episodic_return:.1f}")
