"""The exported folder, read by a forward pass that knows only the specification and the files."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from titan_lowprec.models.dflash.hub import args_from_hub, export_draft, hub_config
from titan_lowprec.models.dflash.model import DraftModel


def independent_block(folder, features_SO, embedded_PE):
    """One block after a context, in float64, from files alone; names as published code has them."""
    config = json.loads((folder / "config.json").read_text())
    w = {name: t.double() for name, t in load_file(folder / "model.safetensors").items()}
    eps, D = config["rms_norm_eps"], config["head_dim"]
    H, J = config["num_attention_heads"], config["num_key_value_heads"]
    S, P = len(features_SO), len(embedded_PE)

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"]

    def rotate(x, position):
        out = torch.empty_like(x)
        for i in range(D // 2):
            angle = position.double() / config["rope_theta"] ** (2 * i / D)
            cos, sin = angle.cos()[:, None], angle.sin()[:, None]
            a, b = x[..., i], x[..., i + D // 2]
            out[..., i], out[..., i + D // 2] = a * cos - b * sin, b * cos + a * sin
        return out

    context = norm(features_SO.double() @ w["fc.weight"].T, "hidden_norm")
    position = torch.arange(S + P)
    x = embedded_PE.double()
    for n in range(config["num_hidden_layers"]):
        at = f"layers.{n}.self_attn"
        h = norm(x, f"layers.{n}.input_layernorm")
        both = torch.cat((context, h))
        q = (h @ w[f"{at}.q_proj.weight"].T).view(P, H, D)
        k = (both @ w[f"{at}.k_proj.weight"].T).view(S + P, J, D)
        v = (both @ w[f"{at}.v_proj.weight"].T).view(S + P, J, D)
        q, k = norm(q, f"{at}.q_norm"), norm(k, f"{at}.k_norm")
        q, k = rotate(q, position[S:]), rotate(k, position)
        out = torch.empty(P, H, D, dtype=torch.float64)
        for head in range(H):
            group = head // (H // J)
            weight = (q[:, head] @ k[:, group].T / math.sqrt(D)).softmax(-1)
            out[:, head] = weight @ v[:, group]
        x = x + out.flatten(1) @ w[f"{at}.o_proj.weight"].T
        h = norm(x, f"layers.{n}.post_attention_layernorm")
        gate, up = (h @ w[f"layers.{n}.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ w[f"layers.{n}.mlp.down_proj.weight"].T
    return norm(x, "norm")


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
    theirs = independent_block(tmp_path, batch.features[0, 6:10], embedded)
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
