"""One process without FSDP2: the same bits, parameters where they were, no cast left behind."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.titan.trainers import SMALL, trainer_of
from titan_lowprec.titan.llama3.args import FLAVORS
from titan_lowprec.titan.llama3.model import LowprecLlama
from titan_lowprec.titan.one_process import hold_whole

POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)


@pytest.fixture
def mesh(tmp_path):
    """One process."""
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Block(nn.Module):
    """Two linear layers of which the checkpointed kind runs twice."""

    def __init__(self, *, checkpointed=False):
        super().__init__()
        self.norm, self.a, self.b = nn.RMSNorm(16), nn.Linear(16, 48), nn.Linear(48, 16)
        self.checkpointed = checkpointed

    def forward(self, x):
        if self.checkpointed:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)

    def inner(self, x):
        assert self.a.weight.dtype == torch.bfloat16
        return self.b(nn.functional.silu(self.a(self.norm(x))))


class Model(nn.Module):
    def __init__(self, *, checkpointed=False):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block(checkpointed=checkpointed) for _ in range(2))
        self.head = nn.Linear(16, 32)
        self.head.bias.requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).float(), tokens.roll(1))


def units(model, frees):
    return dict.fromkeys((model.embedding, *model.blocks, model.head), frees)


def directly(model, mesh, *, frees, reduce_dtype=torch.float32):
    hold_whole(
        model, units(model, frees), mesh, param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype
    )


def through_fsdp2(model, mesh, *, frees):
    for module in units(model, frees):
        fully_shard(module, mesh=mesh, mp_policy=POLICY, reshard_after_forward=frees)
    fully_shard(model, mesh=mesh, mp_policy=POLICY)


def trained(apply, mesh, *, frees, checkpointed=False, **options):
    """Losses, gradients and parameters of three steps of two microbatches."""
    torch.manual_seed(0)
    model = Model(checkpointed=checkpointed)
    apply(model, mesh, frees=frees, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    generator, seen = torch.Generator().manual_seed(1), []
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            loss = model(torch.randint(32, (24,), generator=generator))
            loss.backward()
            seen.append(loss.detach())
        seen += [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return model, [*seen, *(p.to_local().detach() for p in model.parameters())]


@pytest.mark.parametrize("frees", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_steps_equal_those_of_fsdp2_in_every_bit(mesh, frees, checkpointed):
    options = {"frees": frees, "checkpointed": checkpointed}
    _, direct = trained(directly, mesh, **options)
    _, fsdp2 = trained(through_fsdp2, mesh, **options)
    assert len(direct) == len(fsdp2) == 6 + 3 * 12 + 13
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(direct, fsdp2, strict=True))


def test_a_narrow_reduction_rounds_each_gradient(mesh):
    _, wide = trained(directly, mesh, frees=True)
    _, narrow = trained(directly, mesh, frees=True, reduce_dtype=torch.float8_e5m2)
    assert not all(torch.equal(a, b) for a, b in zip(wide, narrow, strict=True))


def test_between_passes_parameters_are_kept_ones_and_casts_hold_no_memory(mesh):
    model, _ = trained(directly, mesh, frees=False)
    kept = dict(model.named_parameters())
    assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in kept.values())
    loss = model(torch.arange(8))  # a forward alone
    assert all(p is kept[name] for name, p in model.named_parameters())
    loss.backward()
    with torch.no_grad():
        model(torch.arange(8))
    assert all(p is kept[name] for name, p in model.named_parameters())


@pytest.mark.parametrize("frees", [True, False])
def test_memory_of_casts_lasts_from_forward_to_backward_at_most(mesh, frees):
    model = Model()
    casts = hold_whole(
        model,
        units(model, frees),
        mesh,
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
    )

    def held():
        return sum(p.untyped_storage().size() for unit in casts for p in unit._working)

    loss = model(torch.arange(8))
    everything = 2 * sum(p.numel() for p in model.parameters())
    assert held() == (0 if frees else everything)
    loss.backward()
    assert held() == 0
    with torch.no_grad():
        model(torch.arange(8))
    assert held() == 0


def test_a_failed_forward_leaves_the_kept_parameters(mesh):
    model = Model()
    directly(model, mesh, frees=True)
    kept = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match="size"):
        model.blocks[0](torch.ones(2, 17, dtype=torch.bfloat16))
    assert all(p is kept[name] for name, p in model.named_parameters())


def test_parameters_outside_of_the_units_or_shared_are_refused(mesh):
    model = Model()
    with pytest.raises(ValueError, match=r"got \['head.bias', 'head.weight'\]"):
        hold_whole(
            model,
            {model.embedding: True, model.blocks: True},
            mesh,
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
        )
    model.head.weight = model.embedding.weight
    with pytest.raises(ValueError, match=r"got \['embedding.weight'\]"):
        directly(model, mesh, frees=True)


@pytest.mark.slow
@pytest.mark.compile
def test_a_compiled_block_equals_that_of_fsdp2(mesh):
    def compiled(apply):
        def applied(model, mesh, **options):
            model.blocks = nn.ModuleList(torch.compile(b, fullgraph=True) for b in model.blocks)
            apply(model, mesh, **options)

        return trained(applied, mesh, frees=True)[1]

    direct, fsdp2 = compiled(directly), compiled(through_fsdp2)
    assert all(torch.equal(a, b) for a, b in zip(direct, fsdp2, strict=True))


OPTIONS = (
    f"--job.config_file={SMALL}",
    "--training.seq_len=64",
    "--training.local_batch_size=2",
    "--training.global_batch_size=4",
    "--validation.no-enable",
    "--debug.seed=1",
    "--attention.recipe=bf16",
    "--lr_scheduler.warmup_steps=2",
    "--lr_scheduler.total_steps=2000",
)


@pytest.mark.slow
def test_a_run_continues_across_fsdp2_and_back_with_the_same_bits(tmp_path):
    def run(folder, steps, kind):
        with trainer_of(
            [
                *OPTIONS,
                f"--job.dump_folder={tmp_path / folder}",
                f"--data.cache_dir={tmp_path / 'cache'}",
                f"--training.steps={steps}",
                f"--parallelism.one_process={kind}",
            ]
        ) as trainer:
            trainer.train()
            return [p.full_tensor().detach() for p in trainer.model_parts[0].parameters()]

    alone = run("fsdp2", 3, "fsdp2")
    run("mixed", 1, "auto")
    run("mixed", 2, "fsdp2")
    for a, b in zip(alone, run("mixed", 3, "direct"), strict=True):
        assert torch.equal(a, b)


def test_blocks_rotate_in_fp32_under_fsdp2_and_without(mesh):
    from titan_lowprec.titan.llama3 import model as llama
    from titan_lowprec.titan.parallelize import hold_in_one_process, shard, sum_gradients
    from titan_lowprec.titan.validate import load_recipe

    config, seen = load_recipe(str(SMALL), []), []
    rotate = llama.rotate
    for apply in (shard, hold_in_one_process):
        model = LowprecLlama(FLAVORS["tiny"])
        with torch.no_grad():
            model.init_weights()
        apply(model, mesh, config)
        sum_gradients(model, mesh)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llama, "rotate", lambda x, r: seen.append((x, r)) or rotate(x, r))
            model(torch.arange(32)[None])
    assert {(x.dtype, r.dtype) for x, r in seen} == {(torch.bfloat16, torch.float32)}
    assert len(seen) == 2 * 2 * FLAVORS["tiny"].n_layers
