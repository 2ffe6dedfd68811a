"""FSDP gathers the model's head once a pass, however many chunks the loss has."""

import copy
import dataclasses

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import CommDebugMode
from torchtitan.models.llama3.infra.parallelize import apply_fsdp

from titan_lowprec.titan.llama3.args import FLAVORS
from titan_lowprec.titan.llama3.model import LowprecLlama


def communication(mesh, chunk_rows):
    """Gathers and reductions of one forward and backward pass over 32 rows."""
    args = dataclasses.replace(
        copy.deepcopy(FLAVORS["tiny"]), n_layers=1, max_seq_len=64, loss_chunk_rows=chunk_rows
    )
    torch.manual_seed(0)
    model = LowprecLlama(args)
    with torch.no_grad():
        model.init_weights()
    apply_fsdp(model, mesh, torch.bfloat16, torch.float32, False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    tokens = torch.randint(args.vocab_size, (1, 32), generator=torch.Generator().manual_seed(0))
    with CommDebugMode() as comm:
        model(tokens, labels=tokens).backward()
    return {str(op): count for op, count in comm.get_comm_counts().items()}


@pytest.mark.slow
def test_more_chunks_gather_nothing_more(two_counted_ranks):
    whole, chunked = communication(two_counted_ranks, 32), communication(two_counted_ranks, 4)
    assert chunked == whole
    # embedding, one layer, norm and head: each once a pass, some again before the backward pass
    assert 3 <= sum(count for op, count in whole.items() if "gather" in op) <= 6, whole
