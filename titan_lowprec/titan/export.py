"""A checkpoint as a complete Hugging Face folder: weights, configuration, tokenizer."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing

from titan_lowprec.data.bundled import resolve_path
from titan_lowprec.titan.checkpoints import SavedRun, args_of, load_model
from titan_lowprec.titan.llama3.args import LowprecLlamaArgs
from titan_lowprec.titan.llama3.model import LowprecLlama
from titan_lowprec.titan.llama3.state_dict import LowprecLlamaStateDictAdapter


def export_hugging_face(run: SavedRun, folder: Path) -> None:
    """Write what ``transformers.AutoModelForCausalLM`` and ``AutoTokenizer`` load.

    transformers computes its own attention, without codes: an exported model is evaluated under
    the attention of transformers, not under the one it trained with.

    Args:
        run: Whose weights; they are written as stored, in fp32.
        folder: A new or empty folder.

    Raises:
        ValueError: The folder holds something.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder}: must be new or empty, holds files; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    model = load_model(run, device=torch.device("cpu"))
    args = args_of(model)
    tensors = LowprecLlamaStateDictAdapter(args, None).to_hf(model.state_dict())
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    add_bos, source = run.config.data.add_bos, Path(resolve_path(run.config.data.tokenizer))
    names = export_tokenizer(source, folder, add_bos=add_bos)
    write_json(folder / "config.json", {**llama_config(model, args), **names})


def llama_config(model: LowprecLlama, args: LowprecLlamaArgs) -> dict[str, Any]:
    """``config.json`` of transformers' Llama."""
    scaling = args.rope_scaling_args
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "intermediate_size": model.layers["0"].feed_forward.w1.out_features,  # pyright: ignore
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads or args.n_heads,
        "hidden_act": "silu",
        "rms_norm_eps": args.norm_eps,
        "max_position_embeddings": type(args).max_seq_len,  # rotary positions have no table to end
        "rope_theta": float(args.rope_theta),
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": scaling.scaling_factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        },
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def export_tokenizer(source: Path, folder: Path, *, add_bos: bool) -> dict[str, int]:
    """Copy a tokenizer so that it begins a text as training documents began.

    Training puts BOS and EOS around documents itself. Here BOS is the tokenizer's task, where it
    has no rule of its own, and EOS nobody's: a prompt is not finished.

    Returns:
        ``bos_token_id`` and ``eos_token_id``, where the tokenizer names them.
    """
    engine = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    ids: dict[str, int] = {}
    for which in ("bos_token", "eos_token"):
        value = settings.get(which)
        token = value.get("content") if isinstance(value, dict) else value
        token_id = None if token is None else engine.token_to_id(token)
        if token_id is not None:
            ids[f"{which}_id"] = token_id
    if add_bos and engine.post_processor is None:
        bos = engine.id_to_token(ids["bos_token_id"])
        engine.post_processor = TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, ids["bos_token_id"])],
        )
    engine.save(str(folder / "tokenizer.json"))
    settings |= {"add_bos_token": add_bos, "add_eos_token": False}
    write_json(folder / "tokenizer_config.json", settings)
    return ids


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a readable JSON file."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
