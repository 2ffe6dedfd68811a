"""The draft model against Hugging Face's Qwen3 layers, and what each draft may depend on."""

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from titan_lowprec.models.dflash.attention import build_mask
from titan_lowprec.models.dflash.masks import DraftMask
from titan_lowprec.models.dflash.model import (
    DraftModel,
    inverse_frequency,
    rotary_table,
    select_taps,
)
from titan_lowprec.models.dflash.tables import FrozenTables, frozen_tables

TABLES = {"embed_scale": 1.0, "output_multiplier": 1.0, "softcap": None}


@pytest.fixture
def make_model():
    """A draft with large random weights, so that everything it may see has an effect."""

    def make(args, *, std=0.3):
        model = DraftModel(args)
        model.init_weights(std=std)
        return model

    return make


def hugging_face(args):
    """Qwen3's own layers, norm and rotary table, with attention in both directions."""
    config = Qwen3Config(
        vocab_size=args.vocab_size,
        hidden_size=args.model_dim,
        intermediate_size=args.hidden_dim,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        rms_norm_eps=args.norm_eps,
        rope_theta=args.rope_theta,
        attn_implementation="eager",
    )
    layers = torch.nn.ModuleList(Qwen3DecoderLayer(config, i) for i in range(args.layers))
    norm = Qwen3RMSNorm(args.model_dim, eps=args.norm_eps)
    return torch.nn.ModuleDict({"layers": layers, "norm": norm}), Qwen3RotaryEmbedding(config)


def test_layers_are_qwen3s_by_name_and_value(make_args, make_model, make_anchors):
    # Without context a lone block is a Qwen3 model whose attention is not causal.
    args = make_args(block_tokens=7)
    model, (theirs, rotary) = make_model(args), hugging_face(args)
    own = {k: v for k, v in model.state_dict().items() if not k.startswith(("fc", "hidden_norm"))}
    theirs.load_state_dict(own, strict=True)
    x, position = torch.randn(2, 7, args.model_dim), torch.arange(7).expand(2, -1) + 1000
    expected = x
    for layer in theirs["layers"]:
        expected = layer(
            expected,
            attention_mask=torch.zeros(2, 1, 7, 7),
            position_embeddings=rotary(x, position),
        )
        expected = expected[0] if isinstance(expected, tuple) else expected
    expected = theirs["norm"](expected)
    nothing = torch.zeros(2, 0, dtype=torch.int64)
    mask = DraftMask(make_anchors((0,), (0,)), nothing, 7).dense()
    out = model(
        torch.zeros(2, 0, args.feature_dim),
        x,
        context_position_BS=nothing,
        block_position_BT=position,
        mask=mask,
        impl="reference",
    )
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_context_and_block_carry_the_positions_of_their_document(
    make_args, make_model, make_batch, make_anchors, make_tables
):
    # Written out with Hugging Face's rotation: the second document's block at its token 4.
    args = make_args(layers=1)
    model, tables = make_model(args), make_tables(args)
    batch = make_batch(args, (10, 12), tokens=24, anchors=make_anchors((14,)))
    seen = []
    model.layers[0].self_attn.register_forward_hook(lambda *call: seen.append(call[1:]))
    batch.hidden(model, tables)
    (x, context, *_), out = seen[0]
    weights, D = model.layers[0].self_attn, args.head_dim

    def heads(y, norm=lambda z: z):
        return norm(y.unflatten(-1, (-1, D))).transpose(1, 2)

    source = torch.cat((context[:, 10:14], x), dim=1)
    q = heads(weights.q_proj(x), weights.q_norm)
    k = heads(weights.k_proj(source), weights.k_norm).repeat_interleave(2, dim=1)
    v = heads(weights.v_proj(source)).repeat_interleave(2, dim=1)
    cos, sin = hugging_face(args)[1](x, torch.arange(4 + args.block_tokens)[None])
    k, _ = apply_rotary_pos_emb(k, k, cos, sin)
    q, _ = apply_rotary_pos_emb(q, q, cos[:, 4:], sin[:, 4:])
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    expected = weights.o_proj(expected.transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_state_dict_has_the_published_names_and_no_table(make_args, make_model):
    args = make_args(layers=1)
    attention = [f"{p}_proj" for p in "qkvo"] + ["q_norm", "k_norm"]
    layer = [f"self_attn.{name}" for name in attention]
    layer += [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    layer += ["input_layernorm", "post_attention_layernorm"]
    names = ["fc", "hidden_norm", "norm", *(f"layers.0.{name}" for name in layer)]
    state = make_model(args).state_dict()
    assert set(state) == {f"{name}.weight" for name in names}
    assert all(args.vocab_size not in x.shape for x in state.values())


def test_context_is_fused_once_and_reaches_layers_as_it_is(make_args, make_model, make_batch):
    args = make_args()
    model, batch = make_model(args), make_batch(args, (20,), tokens=20)
    tables = FrozenTables(*(torch.randn(args.vocab_size, args.model_dim) for _ in "eh"), **TABLES)
    seen = []
    for layer in model.layers:
        layer.self_attn.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    batch.hidden(model, tables)
    x = batch.features @ model.fc.weight.T
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + args.norm_eps)
    assert len(seen) == 2 and seen[0] is seen[1]
    torch.testing.assert_close(seen[0], x, rtol=1e-5, atol=1e-6)


def changed_blocks(model, batch, tables, *, features=None, tokens=None):
    """Blocks whose hidden states change with the features, or the token, at an index."""
    before = batch.hidden(model, tables)
    kept = batch.features, batch.tokens
    batch.features, batch.tokens = (x.clone() for x in kept)
    if features is not None:
        batch.features[:, features] = 1e6 * torch.randn(batch.args.feature_dim)
    if tokens is not None:
        batch.tokens[:, tokens] = (batch.tokens[:, tokens] + 1) % 30
    after = batch.hidden(model, tables)
    batch.features, batch.tokens = kept
    shape = (-1, batch.args.block_tokens * batch.args.model_dim)
    return (before[0].reshape(shape) != after[0].reshape(shape)).any(-1).tolist()


@pytest.fixture
def packed(make_args, make_model, make_batch, make_anchors, make_tables):
    """Two documents of 10 and 12 tokens; anchors close enough for blocks to overlap."""
    args = make_args(anchor_slots=6)
    anchors = make_anchors((3, 4, 8, 12, 14, None), unused=23)
    batch = make_batch(args, (10, 12), tokens=24, anchors=anchors)
    return make_model(args), batch, make_tables(args)


def test_block_depends_on_features_before_its_anchor_in_its_document_alone(packed):
    model, batch, tables = packed
    for t in range(24):
        expected = [t < a and (t >= 10) == (a >= 10) for a in (3, 4, 8, 12, 14)] + [False]
        assert changed_blocks(model, batch, tables, features=t) == expected, t


def test_block_depends_on_its_own_anchor_token_alone(packed):
    # Overlapping blocks: anchor 4 lies inside the block at 3.
    model, batch, tables = packed
    changed = changed_blocks(model, batch, tables, tokens=4)
    assert changed == [False, True, False, False, False, False]


def test_packed_documents_draft_as_they_would_alone(packed, make_batch, make_anchors):
    model, batch, tables = packed
    together = batch.hidden(model, tables)[0].unflatten(0, (6, -1))
    for begin, end, slots in ((0, 10, (0, 1, 2)), (10, 22, (3, 4))):
        position = [int(batch.anchors.position_BA[0, s]) - begin for s in slots]
        anchors = make_anchors(tuple(position))
        alone = make_batch(batch.args, (end - begin,), tokens=end - begin, anchors=anchors)
        alone.tokens = batch.tokens[:, begin:end]
        alone.features = batch.features[:, begin:end]
        out = alone.hidden(model, tables)[0].unflatten(0, (len(slots), -1))
        torch.testing.assert_close(out, together[list(slots)], rtol=1e-4, atol=1e-4)


def test_unused_slots_leave_gradients_finite_and_alone(packed):
    model, batch, tables = packed
    batch.hidden(model, tables)[:, -5:].square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
    assert bool((model.fc.weight.grad == 0).all()), "an unused slot saw the context"


@pytest.mark.parametrize("impl", ["flex_bf16", "flex_fp32_ieee", "flex_fp32_tf32"])
def test_implementations_agree_in_a_bf16_model(packed, impl):
    model, batch, tables = packed
    model = model.bfloat16()
    batch.features = batch.features.bfloat16()
    bf16 = FrozenTables(tables.embed_VE.bfloat16(), tables.head_VE.bfloat16(), **TABLES)
    with torch.no_grad():
        reference, out = (batch.hidden(model, bf16, impl=i) for i in ("reference", impl))
    assert out.dtype == torch.bfloat16
    kept = slice(0, 25)
    error = (out - reference)[:, kept].float().norm() / reference[:, kept].float().norm()
    assert float(error) < 2e-2


@pytest.mark.parametrize("cast", ["bfloat16", "half", "float"])
def test_rotary_frequencies_survive_casts(make_args, make_model, cast):
    args = make_args(rope_theta=1e6, head_dim=128)
    model = getattr(make_model(args), cast)()
    assert not list(model.buffers())
    position = torch.tensor([[4000]])
    table = rotary_table(position, head_dim=args.head_dim, theta=model.args.rope_theta)
    exact = 1e6 ** -(torch.arange(0, 128, 2).double() / 128)
    cos = (4000 * exact).cos()
    assert table.cos_BTD.dtype == torch.float32
    assert float((table.cos_BTD[0, 0, :64] - cos).abs().max()) < 1e-3
    rounded = (4000 * exact.bfloat16().double()).cos()
    assert float((rounded - cos).abs().max()) > 1, "bf16 frequencies would pass"


def test_rotary_frequencies_are_hugging_faces_bits(make_args):
    args = make_args(rope_theta=1e6, head_dim=128)
    _, rotary = hugging_face(args)
    theta = rotary.config.rope_parameters["rope_theta"]
    ours = inverse_frequency(head_dim=128, theta=theta, device=torch.device("cpu"))
    assert torch.equal(ours, rotary.inv_freq)


def test_tap_is_the_output_of_its_layer():
    # Entry 0 is the embedding: layer i adds a one to channel i, and the norm ends the list.
    states, x = [torch.zeros(1, 3, 6)], torch.zeros(1, 3, 6)
    for layer in range(6):
        x = x.clone()
        x[..., layer] = 1
        states.append(x if layer < 5 else 9 * x)
    first, second = select_taps(states, (1, 4)).chunk(2, dim=-1)
    assert first[0, 0].tolist() == [1, 1, 0, 0, 0, 0]
    assert second[0, 0].tolist() == [1, 1, 1, 1, 1, 0]
    with pytest.raises(ValueError, match="final norm"):
        select_taps(states, (5,))


def test_tied_head_is_the_embedding_table():
    embed = torch.nn.Parameter(torch.randn(9, 4))
    tables = frozen_tables(embed, None, tied=True, **TABLES)
    assert tables.head_VE.data_ptr() == tables.embed_VE.data_ptr() == embed.data_ptr()
    copied = frozen_tables(embed, embed.detach().clone(), tied=True, **TABLES)
    assert copied.head_VE.data_ptr() == embed.data_ptr()
    with pytest.raises(ValueError, match="must be its embedding table"):
        frozen_tables(embed, torch.randn(9, 4), tied=True, **TABLES)
    with pytest.raises(ValueError, match="untied target needs its head"):
        frozen_tables(embed, None, tied=False, **TABLES)


def test_trainable_or_mismatched_tables_are_refused():
    with pytest.raises(ValueError, match="must be frozen"):
        FrozenTables(torch.randn(9, 4), torch.randn(9, 4).requires_grad_(), **TABLES)
    with pytest.raises(ValueError, match="must agree"):
        FrozenTables(torch.randn(9, 4), torch.randn(9, 4).bfloat16(), **TABLES)


def test_quirks_of_a_target_are_honoured():
    embed, head, hidden = torch.randn(9, 4), torch.randn(9, 4), torch.randn(3, 4)
    tables = FrozenTables(embed, head, embed_scale=2.0, output_multiplier=0.5, softcap=3.0)
    torch.testing.assert_close(tables.embed(torch.tensor([4])), 2 * embed[4:5])
    expected = 3 * torch.tanh(0.5 * (hidden @ head.T) / 3)
    torch.testing.assert_close(tables.logits(hidden), expected)


def test_mask_is_built_once_for_all_layers(packed, monkeypatch):
    model, batch, tables = packed
    calls = []
    plain = DraftMask.dense
    monkeypatch.setattr(DraftMask, "dense", lambda self: calls.append(1) or plain(self))
    batch.hidden(model, tables)
    assert len(calls) == 1 and len(model.layers) == 2
    assert build_mask(batch.mask, impl="reference").dtype == torch.bool
