"""What a checkpoint of other settings is refused with."""

from pathlib import Path

import pytest

from titan_lowprec.titan.resume import check_resume, run_identity, save_identity
from titan_lowprec.titan.validate import load_recipe

TINY = str(Path(__file__).resolve().parents[2] / "recipes" / "llama_tiny_mxfp8.toml")


@pytest.mark.slow
def test_another_number_of_steps_is_refused_by_the_key_that_people_set(tmp_path):
    def resumed(*overrides: str) -> None:
        config = load_recipe(TINY, [f"--job.dump_folder={tmp_path}", *overrides])
        identity = run_identity(config, global_batch_size=8)
        if not overrides:
            save_identity(config, identity)
        check_resume(config, identity, load_step=63)

    resumed()
    with pytest.raises(ValueError, match=r"total_steps, or else training\.steps: 200 -> 66\n"):
        resumed("--training.steps=66")
    with pytest.raises(ValueError, match=r"  loss\.z_loss: 0\.0 -> 0\.0001\n"):
        resumed("--loss.z_loss=1e-4")
    resumed("--training.steps=66", "--lr_scheduler.total_steps=200")
    resumed("--training.steps=66", "--checkpoint.allow_changed_config")
