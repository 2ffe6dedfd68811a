"""Under ``torchrun``: replay against eager on every process, with documents of its own."""

import sys

import torch
import torch.distributed as dist

from tests.titan.test_graph import LAYOUTS, assert_same_bits, measured, warm_up
from tests.titan.trainers import running_trainer


def main(folder, *options):
    """Compare, and train a few steps through the loop."""
    with running_trainer(folder, "--graph.enable", "--training.steps=5", *options) as trainer:
        rank = dist.get_rank()
        warm_up(trainer)
        for step in range(len(LAYOUTS)):
            layouts = LAYOUTS[(step + 3 * rank) % len(LAYOUTS)]
            replayed = measured(trainer, layouts, 10 * step + rank)
            eager = measured(trainer, layouts, 10 * step + rank, eager=True)
            assert_same_bits(replayed, eager)
        trainer.train()
        assert trainer.microbatch.replays == len(LAYOUTS) + 5, trainer.microbatch.replays
        torch.cuda.synchronize()
        sys.stdout.write("REPLAY EQUALS EAGER\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
