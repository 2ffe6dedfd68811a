"""The model against transformers, and packed documents against the same documents alone."""

import copy
import dataclasses

import pytest
import torch
import transformers
from safetensors.torch import save_file

from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.titan.llama3.args import FLAVORS
from titan_lowprec.titan.llama3.model import LowprecLlama
from titan_lowprec.titan.llama3.state_dict import LowprecLlamaStateDictAdapter
from titan_lowprec.titan.loss import build_loss
from titan_lowprec.titan.specs import AttentionPlan

RECIPES = ["fp32", "bf16", "mxfp8"]


def small_args(recipe="bf16", **changes):
    spec = getattr(AttentionSpec, recipe)(mask="causal")
    spec = dataclasses.replace(spec, tile_q=32, tile_k=32)
    args = dataclasses.replace(
        copy.deepcopy(FLAVORS["tiny"]),
        n_layers=2,
        max_seq_len=128,
        attention=AttentionPlan(spec=spec.encode()),
    )
    return dataclasses.replace(args, **changes)


def build(args):
    model = LowprecLlama(args)
    with torch.no_grad():
        model.init_weights()
    return model


def transformers_twin(model, args):
    """transformers' Llama with the same weights, through our export."""
    config = transformers.LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.dim,
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads,
        intermediate_size=model.layers["0"].feed_forward.w1.out_features,
        rms_norm_eps=args.norm_eps,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": float(args.rope_theta),
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        attn_implementation="eager",
    )
    twin = transformers.LlamaForCausalLM(config)
    exported = LowprecLlamaStateDictAdapter(args, None).to_hf(model.state_dict())
    missing, unexpected = twin.load_state_dict(exported, strict=False)
    assert not missing and not unexpected
    return twin


def test_fp32_logits_equal_transformers():
    args = small_args("fp32")
    model = build(args)
    twin = transformers_twin(model, args)
    tokens = torch.randint(args.vocab_size, (2, 70))
    with torch.no_grad():
        ours, theirs = model(tokens), twin(tokens).logits
    assert (ours - theirs).abs().max() < 1e-4


def test_bf16_logits_are_as_close_to_float64_as_transformers():
    args = small_args()
    model = build(args)
    twin = transformers_twin(model, args)
    tokens = torch.randint(args.vocab_size, (2, 70))
    with torch.no_grad():
        truth = copy.deepcopy(twin).double()(tokens).logits
        theirs = copy.deepcopy(twin).bfloat16()(tokens).logits.double()
        freqs_cis = model.freqs_cis
        model = model.to(torch.bfloat16)
        model.freqs_cis = freqs_cis
        ours = model(tokens).double()
    assert (ours - truth).norm() <= 1.25 * (theirs - truth).norm()


def test_export_then_import_gives_the_same_weights():
    args = small_args()
    model = build(args)
    adapter = LowprecLlamaStateDictAdapter(args, None)
    back = adapter.from_hf(adapter.to_hf(model.state_dict()))
    assert back.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(back[name], value), name


def test_tied_checkpoint_loads_with_the_embedding_as_head(tmp_path):
    args = small_args()
    adapter = LowprecLlamaStateDictAdapter(args, None)
    requested = adapter.to_hf(build(args).state_dict())
    tied = {
        name: value.contiguous() for name, value in requested.items() if name != "lm_head.weight"
    }
    save_file(tied, tmp_path / "model.safetensors")
    adapter.get_hf_storage_reader(str(tmp_path))
    assert "lm_head.weight" not in requested
    loaded = adapter.from_hf(requested)
    assert torch.equal(loaded["output.weight"], loaded["tok_embeddings.weight"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_packed_documents_equal_the_documents_alone(recipe):
    args = small_args(recipe)
    model = build(args)
    lengths = (5, 40, 33, 1)
    tokens = torch.randint(args.vocab_size, (1, sum(lengths)))
    cu_seqlens = torch.tensor([[0, 5, 45, 78, 79]], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(tokens, cu_seqlens=cu_seqlens, positions=positions)
    packed.square().sum().backward()
    packed_grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    alone = []
    for document in tokens.split(lengths, dim=1):
        logits = model(document)
        logits.square().sum().backward()
        alone.append(logits)
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        error = (packed_grads[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-4, name


def test_high_precision_layers_keep_bf16():
    args = small_args("mxfp8")
    args.attention.high_precision_layers = [1]
    model = build(args)
    recipes = [layer.attention.spec.recipe for layer in model.layers.values()]
    assert recipes == ["mxfp8", "bf16"]


@pytest.mark.parametrize(
    ("flavor", "expected"),
    [
        # 2 V E + layers (2 E E + 2 E J D + 3 E F + 2 E) + E
        (
            "1B",
            2 * 128256 * 2048 + 16 * (2 * 2048**2 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 4096) + 2048,
        ),
        ("stock1p35B", 2 * 128256 * 2048 + 16 * (4 * 2048**2 + 3 * 2048 * 5632 + 4096) + 2048),
        ("8B", 8_030_261_248),  # Llama 3 8B
    ],
)
def test_flavors_have_the_stated_number_of_parameters(flavor, expected):
    with torch.device("meta"):
        model = LowprecLlama(FLAVORS[flavor])
    assert sum(p.numel() for p in model.parameters()) == expected


class _Config:
    """Just enough of a job file for the loss component."""

    def __init__(self, impl):
        self.loss = type("Loss", (), {"impl": impl, "z_loss": 0.0, "softcap": 0.0})


def test_loss_without_valid_tokens_is_zero_with_zero_gradients():
    logits = torch.randn(1, 8, 32, requires_grad=True)
    loss = build_loss(_Config("logits_fp32"))(logits, torch.full((1, 8), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None and not logits.grad.any()


def test_fp32_loss_of_bf16_logits_is_exact_where_the_bf16_loss_is_not():
    logits = (4 * torch.randn(2, 64, 4096)).bfloat16()
    labels = torch.randint(4096, (2, 64))
    truth = torch.nn.functional.cross_entropy(
        logits.double().flatten(0, 1), labels.flatten(), reduction="sum"
    )
    fp32, bf16 = (
        build_loss(_Config(impl))(logits, labels) for impl in ("logits_fp32", "logits_bf16")
    )
    assert fp32.dtype == torch.float32
    assert abs(fp32 - truth) / truth < 1e-6 < abs(bf16 - truth) / truth
