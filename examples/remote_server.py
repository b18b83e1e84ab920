"""Serve simulators over TCP: python remote_server.py PORT. `remote_simulator.py` is the other side.

Each connection gets a simulator of its own, the tank of `fake_simulator.py`, which lives as long as the connection.
Whoever reaches the port can use it: listen on a private network, or through `ssh -L`.
"""

import json
import socketserver
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fake_simulator import Tank


class Client(socketserver.StreamRequestHandler):
    """One connection: a line of JSON for each line, until the client closes it or disappears."""

    def handle(self) -> None:
        """Answer questions."""
        tank = Tank()
        for line in self.rfile:
            [(command, argument)] = json.loads(line).items()
            self.wfile.write(json.dumps(getattr(tank, command)(argument)).encode() + b"\n")


class Server(socketserver.ThreadingTCPServer):
    """A thread for each connection."""

    # so that a server that was killed can start again on its port at once
    allow_reuse_address = True
    daemon_threads = True


@contextmanager
def serving(port: int = 0) -> Iterator[str]:
    """Run this program on this machine; yield its address."""
    with subprocess.Popen(
        [sys.executable, __file__, str(port)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield f"127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


if __name__ == "__main__":
    with Server(("127.0.0.1" if sys.argv[1] == "0" else "", int(sys.argv[1])), Client) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()
