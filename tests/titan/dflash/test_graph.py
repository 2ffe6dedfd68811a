"""A replayed step of a draft equals an eager one in every bit, whatever anchors it has."""

import contextlib
import dataclasses
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torchtitan.models.qwen3 import Qwen3ModelArgs

from tests.titan.dflash.conftest import SMALL
from tests.titan.trainers import trainer_of
from titan_lowprec.models.dflash.model import DraftModel
from titan_lowprec.titan.check_config import ConfigError
from titan_lowprec.titan.dflash.args import FLAVORS, QWEN3_FLAVORS, DraftModelArgs
from titan_lowprec.titan.dflash.batch import anchors_of
from titan_lowprec.titan.dflash.loader import build_draft_loader
from titan_lowprec.titan.dflash.objective import DraftMask, DraftObjective
from titan_lowprec.titan.graph_options import build_microbatch, hooks_are_due

BATCHES = 9
QWEN3 = Qwen3ModelArgs(
    vocab_size=2048, dim=256, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=64, hidden_dim=512
)
DRAFT = DraftModelArgs(
    target_model="qwen3",
    target_flavor="kernels",
    layers=2,
    heads=4,
    kv_heads=2,
    draft_head_dim=64,
    hidden_dim=512,
    taps=(1, 2),
)
COMMON = (
    "--model.flavor=kernels",
    "--graph.enable",
    "--attention.recipe=bf16",
    "--dflash.acceptance_freq=1000",
    "--dflash.anchor_slots=24",
    "--dflash.block_tokens=16",
    "--training.seq_len=512",
    "--training.mixed_precision_param=bfloat16",
    "--checkpoint.no-enable",
    "--data.max_documents=32",
)
VARIANTS = {
    "flex_bf16": (),
    "fp32_ieee": ("--dflash.attention=flex_fp32_ieee",),
    "fp32_tf32-dpace": ("--dflash.attention=flex_fp32_tf32", "--dflash.objective=dpace"),
    "logits_bf16": ("--loss.impl=logits_bf16",),
    "compiled": ("--compile.enable", "--compile.components=model"),
    "checkpointed": (
        "--activation_checkpoint.mode=full",
        "--activation_checkpoint.no-preserve_rng_state",
    ),
}


@contextlib.contextmanager
def drafting_trainer(folder, *overrides):
    QWEN3_FLAVORS["kernels"] = dataclasses.replace(QWEN3)
    FLAVORS["kernels"] = dataclasses.replace(DRAFT)
    paths = (f"--job.dump_folder={folder}", f"--data.cache_dir={folder}-cache")
    try:
        with trainer_of([f"--job.config_file={SMALL}", *paths, *COMMON, *overrides]) as trainer:
            yield trainer
    finally:
        del FLAVORS["kernels"], QWEN3_FLAVORS["kernels"]


def measured(trainer, inputs, labels, **options):
    """Loss and gradients of one microbatch from gradients of zero."""
    trainer.optimizers.zero_grad(set_to_none=not trainer.microbatch.keeps_gradients)
    denominator = trainer.loss_fn.batch_weights(inputs)[0].clamp(min=1).float().cuda()
    loss = trainer.microbatch(inputs, labels, denominator, **options)
    return loss, [p.grad.to_local().clone() for p in trainer.model_parts[0].parameters()]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_replay_equals_eager_in_every_bit_for_other_anchors(tmp_path, variant):
    with drafting_trainer(tmp_path / "run", *VARIANTS[variant]) as trainer:
        trainer.data_wait_s = 0.0  # what a step begins with
        batches = trainer.batch_generator(trainer.dataloader)
        for _ in range(2):
            measured(trainer, *next(batches))
            trainer.optimizers.step()
        assert trainer.microbatch.keeps_gradients
        seen = set()
        for number in range(BATCHES):
            inputs, labels = next(batches)
            if number == 3:  # fewer anchors than slots in one row, none in the other
                inputs["anchor_keep"][0, 5:] = False
                inputs["anchor_keep"][1] = False
            if number == 4:  # none at all
                inputs["anchor_keep"][:] = False
            seen.add(str(inputs["anchor_position"].tolist()))
            replayed = measured(trainer, inputs, labels)
            eager = measured(trainer, inputs, labels, eager=True)
            assert torch.equal(replayed[0], eager[0]) and bool(eager[0].isfinite())
            for index, (got, wanted) in enumerate(zip(replayed[1], eager[1], strict=True)):
                assert torch.equal(got, wanted), (number, index)
                assert bool(wanted.any()) == (number != 4), (number, index)
        assert len(seen) == BATCHES == trainer.microbatch.replays


@pytest.mark.gpu
@pytest.mark.slow
def test_a_run_replays_all_steps_that_do_not_count_acceptance(tmp_path):
    options = ("--training.steps=8", "--dflash.acceptance_freq=4")
    with drafting_trainer(tmp_path / "graph", *options) as trainer:
        trainer.train()
        # 2 eager steps, and acceptance at 4 and 8
        assert trainer.microbatch.replays == 4


def test_counting_acceptance_makes_a_step_eager(parse, resolve, make_target):
    config = parse("--dflash.acceptance_freq=3")
    target = make_target(config)
    objective = DraftObjective(resolve(config), config, target=target, tables=target.tables)
    health = types.SimpleNamespace(health=types.SimpleNamespace(every=0))
    trainer = types.SimpleNamespace(loss_fn=objective, metrics_processor=health, step=1)
    batches = [next(build_draft_loader(1, 0, None, config))]
    due = []
    for _ in range(4):
        objective.step_denominator(batches, torch.device("cpu"))
        due.append(hooks_are_due(trainer))
    assert due == [True, False, True, True]  # the first, every third, the last of four


def test_a_target_that_reads_offsets_on_the_host_is_no_part_of_a_graph(parse, resolve, make_target):
    config = parse("--graph.enable")
    target = make_target(config)
    objective = DraftObjective(resolve(config), config, target=target, tables=target.tables)
    trainer = types.SimpleNamespace(job_config=config, loss_fn=objective)
    with pytest.raises(ConfigError, match=r"graph\.enable: .* reads document offsets on the host"):
        build_microbatch(trainer)
    offline = DraftObjective(resolve(config), config, target=None, tables=target.tables)
    assert offline.obstacle_to_capture() is None


@pytest.mark.parametrize("impl", ["linear_chunked", "logits_bf16"])
@pytest.mark.parametrize("objective", ["decay", "dpace"])
@pytest.mark.slow
def test_forward_and_backward_never_read_the_device(
    parse, resolve, make_target, monkeypatch, impl, objective
):
    """On fake tensors every value that the host asks for is an error."""
    # labels are checked on a CPU only
    monkeypatch.setattr("titan_lowprec.ops.cross_entropy.api.check_labels", lambda *_, **__: None)
    config = parse(f"--loss.impl={impl}", f"--dflash.objective={objective}")
    target = make_target(config)
    made = DraftObjective(resolve(config), config, target=target, tables=target.tables)
    made.head = "logits_bf16" if impl == "logits_bf16" else "reference"
    inputs, labels = next(build_draft_loader(1, 0, None, config))
    model = DraftModel(made.draft)
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    fake = {name: mode.from_tensor(x) for name, x in inputs.items()}
    features = mode.from_tensor(made.features(inputs))
    tables = [mode.from_tensor(x) for x in (target.tables.embed_VE, target.tables.head_VE)]
    made.tables = dataclasses.replace(target.tables, embed_VE=tables[0], head_VE=tables[1])
    made.features = lambda inputs: features
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            faked = torch.nn.Parameter(mode.from_tensor(parameter.detach()))
            setattr(module, name, faked)
    with mode:
        mask = DraftMask(anchors_of(fake), fake["document_ids"], made.draft.block_tokens)
        assert mask.block_sparse().shape == (2, 1, mask.queries, mask.keys)
        (made.loss_sum(model, fake, labels) / 2.0).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.compile
def test_layers_compile_whole_and_keep_their_loss(parse, resolve, make_target):
    config = parse()
    target = make_target(config)
    made = DraftObjective(resolve(config), config, target=target, tables=target.tables)
    batches = build_draft_loader(1, 0, None, config)
    torch.manual_seed(0)
    model = DraftModel(made.draft)
    model.init_weights()
    compiled = DraftModel(made.draft)
    compiled.load_state_dict(model.state_dict())
    # another batch has another mask and must not break the graph
    for number, layer in compiled.layers.named_children():
        whole = torch.compile(layer, backend="eager", fullgraph=True)
        compiled.layers.register_module(number, whole)
    for _ in range(2):
        inputs, labels = next(batches)
        losses = [made.loss_sum(m, inputs, labels) for m in (model, compiled)]
        assert torch.equal(*losses)
        losses[1].backward()
    assert all(p.grad is not None for p in compiled.parameters())
    torch._dynamo.reset()
