import pytest
import torch
import torch.nn as nn

from titan_lowprec.titan.flops import (
    attention_pairs,
    matmul_parameters,
    peak_of,
    training_flops,
)


def offsets(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def test_pairs_of_two_documents_of_3_and_5_tokens_are_6_and_15():
    assert attention_pairs(offsets([0, 3, 8, 8]), mask="causal") == 6 + 15
    assert attention_pairs(offsets([0, 3, 8, 8]), mask="full") == 9 + 25


def test_pairs_add_over_rows_and_leave_out_the_tail_and_empty_documents():
    rows = offsets([0, 0, 2, 2], [0, 1, 4, 4])  # of rows of 16 tokens
    assert attention_pairs(rows, mask="causal") == 3 + (1 + 6)


def test_pairs_of_a_row_of_three_million_tokens_do_not_overflow():
    n = 3_000_000
    assert attention_pairs(offsets([0, n]), mask="causal") == n * (n + 1) // 2


def test_flops_of_a_two_document_pack_by_hand():
    # 8 tokens through 1,000 weights: 6,000 a token. Attention: 21 pairs, 2 layers, 2 heads of 16:
    # forward 2 products x 2 FLOPs x 16 x 21 x 2 x 2 = 5,376, backward twice that.
    flops = training_flops(
        matmul_parameters=1000, tokens=8, attention_pairs=21, n_heads=2, head_dim=16, n_layers=2
    )
    assert flops == 8 * 6000 + 3 * 5376


def test_flops_equal_those_that_torch_counts_for_a_dense_layer():
    from torch.utils.flop_counter import FlopCounterMode

    T, E, H, D = 24, 32, 2, 16
    linear = nn.Linear(E, 3 * H * D, bias=False)
    x = torch.randn(T, E, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        q, k, v = linear(x).view(T, 3, H, D).permute(1, 2, 0, 3)
        ((q @ k.mT).softmax(-1) @ v).sum().backward()
    ours = training_flops(
        matmul_parameters=matmul_parameters([linear]),
        tokens=T,
        attention_pairs=attention_pairs(offsets([0, T]), mask="full"),
        n_heads=H,
        head_dim=D,
        n_layers=1,
    )
    assert ours == counter.get_total_flops()


def test_matmul_parameters_leave_out_embeddings_norms_and_biases():
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(50, 8), "norm": nn.RMSNorm(8), "head": nn.Linear(8, 50)}
    )
    assert matmul_parameters([model]) == 8 * 50


@pytest.mark.parametrize(
    ("device", "name", "flops_per_s"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM bf16 dense", 989e12),
        ("NVIDIA H100 PCIe", "H100 PCIe bf16 dense", 756e12),
        ("NVIDIA H100 NVL", "H100 NVL bf16 dense", 835e12),
        ("NVIDIA H200", "H200 SXM bf16 dense", 989e12),
        ("NVIDIA H200 NVL", "H200 NVL bf16 dense", 835e12),
        ("NVIDIA GH200 480GB", "GH200 bf16 dense", 989e12),
        ("NVIDIA B200", "B200 bf16 dense", 2.25e15),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM bf16 dense", 312e12),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe bf16 dense", 312e12),
    ],
)
def test_peak_is_the_named_chips(device, name, flops_per_s):
    peak = peak_of(device)
    assert (peak.name, peak.flops_per_s) == (name, flops_per_s)


@pytest.mark.parametrize(
    "device",
    [
        "NVIDIA B300",
        "NVIDIA GB300",
        "NVIDIA L40S",
        "NVIDIA RTX PRO 6000 Blackwell",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H20",
        "CPU Intel(R) Xeon(R)",
        "",
    ],
)
def test_an_unlisted_device_has_no_peak(device):
    assert peak_of(device) is None
