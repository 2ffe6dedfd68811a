"""The exported folder, read by a forward pass that knows only the specification and the files."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.models.dflash.independent import independent_block
from titan_lowprec.models.dflash.hub import args_from_hub, export_draft, hub_config
from titan_lowprec.models.dflash.model import DraftModel


def test_export_is_the_draft_for_code_that_knows_only_the_files(
    tmp_path, make_args, make_batch, make_anchors, make_tables
):
    args = make_args()
    model, tables = DraftModel(args), make_tables(args)
    model.init_weights(std=0.3)
    export_draft(model, tmp_path, dtype=torch.float32, max_positions=64)
    # the second document's block at its token 4 sees that document's four tokens
    batch = make_batch(args, (6, 12), tokens=20, anchors=make_anchors((10,)))
    ours = batch.hidden(model, tables)[0]
    embedded = tables.embed(batch.blocks.input_BT)[0]
    config = json.loads((tmp_path / "config.json").read_text())
    weights = {n: t.double() for n, t in load_file(tmp_path / "model.safetensors").items()}
    theirs = independent_block(config, weights, batch.features[0, 6:10], embedded)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_configuration_has_what_inference_code_reads_and_comes_back(tmp_path, make_args):
    args = make_args(mask_id=36, tap_layers=(1, 3))
    export_draft(DraftModel(args), tmp_path, dtype=torch.bfloat16, max_positions=64)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == args.block_tokens
    assert config["num_target_layers"] == args.target_layers
    assert config["dflash_config"] == {"mask_token_id": 36, "target_layer_ids": [1, 3]}
    stored = load_file(tmp_path / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    assert not [name for name in stored if "embed" in name or "lm_head" in name]
    back = args_from_hub(tmp_path, anchor_slots=args.anchor_slots, gamma=args.gamma)
    assert back == args


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_size": None}, "block_size"),
        ({"dflash_config": None}, "mask_token_id"),
        ({"attention_bias": True}, "not implemented"),
        ({"rope_scaling": {"factor": 4}}, "not implemented"),
    ],
)
def test_configurations_of_something_else_are_refused(tmp_path, make_args, change, reason):
    config = hub_config(make_args(), dtype=torch.float32, max_positions=8) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=reason):
        args_from_hub(tmp_path, anchor_slots=4, gamma=3.0)
