"""What a draft computes in which type under mixed precision."""

import pytest
import torch

from tests.titan.dflash.conftest import SMALL
from tests.titan.trainers import trainer_of
from titan_lowprec.models.dflash.model import RotaryTable


@pytest.mark.slow
def test_rotation_stays_fp32_where_parameters_are_bf16(tmp_path, monkeypatch):
    seen = []
    rotate = RotaryTable.rotate

    def recorded(table, x):
        seen.append((x.dtype, table.cos_BTD.dtype, table.sin_BTD.dtype))
        return rotate(table, x)

    monkeypatch.setattr(RotaryTable, "rotate", recorded)
    arguments = [
        f"--job.config_file={SMALL}",
        f"--job.dump_folder={tmp_path / 'run'}",
        f"--data.cache_dir={tmp_path / 'cache'}",
        "--training.mixed_precision_param=bfloat16",
        "--training.steps=1",
        "--checkpoint.no-enable",
    ]
    with trainer_of(arguments) as trainer:
        trainer.train()
    assert set(seen) == {(torch.bfloat16, torch.float32, torch.float32)}
