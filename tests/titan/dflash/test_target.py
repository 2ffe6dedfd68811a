"""The frozen target against transformers, packed against alone, and weights that do not fit."""

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter

from titan_lowprec.titan.dflash.generate import greedy_answers
from titan_lowprec.titan.dflash.target import build_tables
from titan_lowprec.titan.dflash.weights import path_kind, read_tables, tables_digest
from titan_lowprec.titan.llama3.state_dict import LowprecLlamaStateDictAdapter

pytestmark = pytest.mark.slow
TARGETS = ["tiny", "tiny_qwen3"]


def transformers_twin(target):
    """The same weights in transformers, through the export that checkpoints use."""
    model, args = target.module.model, target.module.model.model_args
    sizes = {
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "intermediate_size": model.layers["0"].feed_forward.w1.out_features,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "rms_norm_eps": args.norm_eps,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    }
    llama = hasattr(model, "freqs_cis")
    rope = {"rope_type": "default", "rope_theta": float(args.rope_theta)}
    if llama:
        rope |= {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        config = transformers.LlamaConfig(
            **sizes, rope_parameters=rope, max_position_embeddings=131072
        )
        adapter = LowprecLlamaStateDictAdapter(args, None)
        twin = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.Qwen3Config(**sizes, rope_parameters=rope, head_dim=args.head_dim)
        adapter = Qwen3StateDictAdapter(args, None)
        twin = transformers.Qwen3ForCausalLM(config)
    state = adapter.to_hf(model.state_dict())
    twin.load_state_dict(state, strict=True)
    return twin.eval(), state


@pytest.mark.parametrize("flavor", TARGETS)
def test_taps_and_logits_are_transformers_hidden_states(parse, make_target, flavor):
    target = make_target(parse(f"--model.flavor={flavor}"))
    twin, _ = transformers_twin(target)
    tokens = torch.randint(2048, (40,))
    step = target.step(tokens)
    with torch.no_grad():
        out = twin(tokens[None], output_hidden_states=True)
    expected = torch.cat([out.hidden_states[layer + 1][0] for layer in (1, 2)], dim=-1)
    torch.testing.assert_close(step.features_SO, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(step.logits_SV, out.logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("flavor", TARGETS)
def test_packed_documents_have_the_features_that_they_have_alone(parse, make_target, flavor):
    target = make_target(parse(f"--model.flavor={flavor}"))
    tokens, lengths = torch.randint(2048, (48,)), (17, 20)
    position = torch.cat([torch.arange(n) for n in (*lengths, 11)])
    cu_seqlens = torch.tensor([[0, 17, 37, 37]], dtype=torch.int32)
    packed = target.features(tokens[None], position_BS=position[None], cu_seqlens_BM=cu_seqlens)[0]
    for begin, end in ((0, 17), (17, 37)):
        alone = target.step(tokens[begin:end]).features_SO
        torch.testing.assert_close(packed[begin:end], alone, rtol=1e-5, atol=1e-5)
    assert not packed.requires_grad
    assert not [p for p in target.module.parameters() if p.requires_grad]


@pytest.mark.parametrize("flavor", TARGETS)
def test_hugging_face_files_give_the_same_target_and_tables(
    parse, make_target, resolve, tmp_path, flavor
):
    config = parse(f"--model.flavor={flavor}")
    target = make_target(config)
    _, state = transformers_twin(target)
    folder = tmp_path / "hub"
    folder.mkdir()
    save_file({k: v.contiguous().clone() for k, v in state.items()}, folder / "model.safetensors")
    config.dflash.target_path = str(folder)
    loaded = make_target(config)
    tokens = torch.randint(2048, (20,))
    assert torch.equal(loaded.step(tokens).logits_SV, target.step(tokens).logits_SV)
    device = torch.device("cpu")
    tables = build_tables(resolve(config), config, device=device, dtype=torch.bfloat16)
    assert tables_digest(tables) == tables_digest(target.tables)
    assert tables_digest(tables) != tables_digest(
        make_target(parse(f"--model.flavor={flavor}", "--debug.seed=4")).tables
    )


def test_weights_that_are_missing_or_another_targets_are_refused(parse, make_target, tmp_path):
    config = parse()
    config.dflash.target_path = str(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="train the target first"):
        make_target(config)
    folder = tmp_path / "other"
    folder.mkdir()
    save_file({"model.embed_tokens.weight": torch.zeros(100, 128)}, folder / "model.safetensors")
    sizes = {"dim": 128, "tied": True, "seed": 0}
    with pytest.raises(ValueError, match=r"must be \(2048, 128\), got \(100, 128\)"):
        read_tables(str(folder), vocab_size=2048, **sizes)
    with pytest.raises(ValueError, match="hold the target's head"):
        read_tables(str(folder), vocab_size=100, **(sizes | {"tied": False}))
    assert path_kind(str(folder)) == "hugging_face"
    assert path_kind(str(tmp_path)) is None


@pytest.mark.parametrize("flavor", TARGETS)
def test_cached_answers_are_greedy_decoding_by_transformers(parse, make_target, flavor):
    target = make_target(parse(f"--model.flavor={flavor}"))
    twin, _ = transformers_twin(target)
    prompts = torch.randint(2, 2048, (3, 9))
    answers = greedy_answers(target, prompts, answer_tokens=12, eos_ids=())
    tokens = prompts
    with torch.no_grad():
        for _ in range(12):
            tokens = torch.cat((tokens, twin(tokens).logits[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(answers, tokens[:, 9:])
    eos = int(answers[1, 4])
    cut = greedy_answers(target, prompts, answer_tokens=12, eos_ids=(eos,))
    first = answers[1].tolist().index(eos)
    assert cut[1].tolist() == answers[1, :first].tolist() + [eos] * (12 - first)
    with pytest.raises(ValueError, match="at most 128 tokens"):
        greedy_answers(target, prompts, answer_tokens=120, eos_ids=())
