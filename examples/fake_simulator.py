"""Stand in for a simulator with a socket: print a port, then answer one client, a line of JSON for each line."""

import json
import random
import socket
from typing import Any


class Tank:
    """A tank with a random outflow."""

    def reset(self, seed: int) -> dict[str, Any]:
        """Begin an episode."""
        self.rng = random.Random(seed)
        self.level, self.outflow, self.steps = self.rng.uniform(0.2, 2.0), 0.3, 0
        return {"obs": [self.level, self.outflow]}

    def step(self, inflow: float) -> dict[str, Any]:
        """Simulate a minute."""
        self.steps += 1
        self.outflow = min(0.8, max(0.1, self.outflow + self.rng.uniform(-0.05, 0.05)))
        self.level += 0.2 * (inflow - self.outflow)
        empty = self.level <= 0
        self.level = min(10.0, max(0.0, self.level))
        reward = -10.0 if empty else -abs(self.level - 1)
        return {
            "obs": [self.level, self.outflow],
            "reward": reward,
            "terminated": empty,
            "truncated": self.steps >= 200,
        }


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as server:  # port 0: one that is free
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
        tank = Tank()
        with connection, connection.makefile("rw", encoding="utf8") as stream:
            for line in stream:  # ends when the client closes, or dies
                [(command, argument)] = json.loads(line).items()
                stream.write(json.dumps(getattr(tank, command)(argument)) + "\n")
                stream.flush()
