"""A draft's forward pass that knows only the specification, in float64."""

import math

import torch


def independent_block(config, w, features_SO, embedded_PE):
    """One block after its document's context, in float64; names as published code has them.

    Args:
        config: Of ``config.json``.
        w: Tensors of ``model.safetensors``, as float64.
        features_SO: Taps of the document's tokens before the anchor.
        embedded_PE: Embeddings of the anchor and of mask tokens.
    """
    eps, D = config["rms_norm_eps"], config["head_dim"]
    H, J = config["num_attention_heads"], config["num_key_value_heads"]
    S, P = len(features_SO), len(embedded_PE)

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"]

    def rotate(x, position):
        first, second = [], []
        for i in range(D // 2):
            angle = position.double() / config["rope_theta"] ** (2 * i / D)
            cos, sin = angle.cos()[:, None], angle.sin()[:, None]
            a, b = x[..., i], x[..., i + D // 2]
            first.append(a * cos - b * sin)
            second.append(b * cos + a * sin)
        return torch.stack((*first, *second), dim=-1)

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
        outs = []
        for head in range(H):
            group = head // (H // J)
            weight = (q[:, head] @ k[:, group].T / math.sqrt(D)).softmax(-1)
            outs.append(weight @ v[:, group])
        x = x + torch.cat(outs, dim=1) @ w[f"{at}.o_proj.weight"].T
        h = norm(x, f"layers.{n}.post_attention_layernorm")
        gate, up = (h @ w[f"layers.{n}.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ w[f"layers.{n}.mlp.down_proj.weight"].T
    return norm(x, "norm")
