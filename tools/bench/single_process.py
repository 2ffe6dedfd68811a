"""What torchrun would have set for a world of one process."""

import os
import socket

RANK_VARIABLES = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


def become_single_process() -> None:
    """Set rank, size and a free rendezvous port of this process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK_VARIABLES, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
