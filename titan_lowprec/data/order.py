"""Permutations that are a pure function of seed, epoch and window, on every NumPy release."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """The shuffles of one window of one epoch.

    Permutations sort the raw output of Philox: NumPy keeps a bit generator's stream fixed across
    releases, and does not promise that for ``Generator.permutation``.
    """

    seed: int
    epoch: int
    window: int

    def documents(self, count: int) -> Int64[np.ndarray, " N"]:
        """Return the order in which documents reach the packer."""
        return self._permutation(0, count)

    def rows(self, count: int) -> Int64[np.ndarray, " R"]:
        """Return the order in which packed rows are handed out."""
        return self._permutation(1, count)

    def _permutation(self, stream: int, count: int) -> Int64[np.ndarray, " N"]:
        # The upper counter words keep streams and windows apart; the lower two count draws.
        counter = np.array([0, 0, self.window, stream], dtype=np.uint64)
        key = np.array([self.seed, self.epoch], dtype=np.uint64)
        raw = np.random.Philox(key=key, counter=counter).random_raw(count)
        return np.argsort(raw, kind="stable").astype(np.int64)
