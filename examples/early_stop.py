"""Train CartPole until its mean return reaches 400: python early_stop.py."""

import dppo


class StopAt(dppo.Observer):
    """Stop the run when the mean return of the last 100 episodes reaches `target`."""

    def __init__(self, target: float) -> None:
        self.target = target

    def on_iteration(self, row: dict[str, float]) -> bool:
        return row.get("charts/episodic_return", 0.0) >= self.target


if __name__ == "__main__":
    result = dppo.train(dppo.Config(env_id="CartPole-v1", num_samplers=8), observers=[StopAt(400)])
    print(f"{result.stopped_by} after {result.global_step:,} steps: {result.episodic_return:.1f}")
