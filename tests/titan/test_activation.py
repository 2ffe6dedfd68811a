"""Checkpoint policies by what they do: calls counted, gradients in bits, bytes kept alive."""

import copy
import weakref
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.config import ConfigManager, JobConfig

from titan_lowprec.ops.attention import api as attention_api
from titan_lowprec.ops.attention.reference.forward import forward_reference
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.titan import job_config
from titan_lowprec.titan.activation import (
    apply_activation_checkpointing,
    count_attention,
    forced_shapes,
    ops_of,
    saved_is_smaller,
)
from titan_lowprec.titan.llama3.args import LowprecLlamaArgs
from titan_lowprec.titan.llama3.model import LowprecLlama
from titan_lowprec.titan.specs import AttentionPlan

CONFIG = ConfigManager._merge_configs(JobConfig, job_config.JobConfig)
LAYERS, ROWS, TOKENS = 3, 2, 64
ATTENTION = torch.ops.titan_lowprec.attention_forward.default
BACKWARD = torch.ops.titan_lowprec.attention_backward.default
HEAD = torch.ops.titan_lowprec.linear_cross_entropy_forward.default
MM = torch.ops.aten.mm.default
SELECTIVE = {"mode": "selective", "selective_ac_option": "op"}


class Watch(TorchDispatchMode):
    """Counts calls, and bytes of results that are alive."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()
        self.live_bytes = self.peak_bytes = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func] += 1
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

        def free():
            self._known.discard(key)
            self.live_bytes -= size

        weakref.finalize(storage, free)


class Result:
    """One forward and backward."""

    def __init__(self, model, section, inputs):
        model = copy.deepcopy(model)
        config = CONFIG()
        for name, value in {"preserve_rng_state": False, **section}.items():
            assert hasattr(config.activation_checkpoint, name)
            setattr(config.activation_checkpoint, name, value)
        apply_activation_checkpointing(model, config, compiled=False)
        tokens, offsets, labels = inputs
        with Watch() as self.watch:
            loss = model(tokens, cu_seqlens=offsets, labels=labels)
            self.kept_bytes = self.watch.live_bytes
            self.forward_calls = Counter(self.watch.calls)
            loss.backward()
        self.loss = loss.detach()
        self.gradients = [p.grad for p in model.parameters()]

    @property
    def calls(self):
        return self.watch.calls

    @property
    def peak_bytes(self):
        return self.watch.peak_bytes


def build(recipe):
    spec = getattr(AttentionSpec, recipe)(mask="causal").encode()
    args = LowprecLlamaArgs(
        dim=128, n_layers=LAYERS, n_heads=4, n_kv_heads=2, vocab_size=256, multiple_of=64,
        max_seq_len=TOKENS, attention=AttentionPlan(spec=spec), loss_chunk_rows=128,
    )  # fmt: skip
    model = LowprecLlama(args)
    torch.nn.Module.to(model, torch.float32)
    with torch.no_grad():
        model.init_weights()
    return model


@pytest.fixture(scope="module")
def inputs():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (ROWS, TOKENS), generator=generator)
    offsets = torch.tensor([[0, 40, 64], [0, 64, 64]], dtype=torch.int32)
    return tokens, offsets, torch.roll(tokens, -1, 1)


@pytest.fixture(scope="module")
def results(inputs):
    """``results(recipe, **section)``, computed once."""
    models, done = {}, {}

    def results(recipe="mxfp8", **section):
        key = (recipe, repr(section))
        if recipe not in models:
            models[recipe] = build(recipe)
        if key not in done:
            done[key] = Result(models[recipe], section, inputs)
        return done[key]

    return results


def fast_first(names):
    """The first policy in every pass, the others in the slow one."""
    first, *others = names
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


POLICIES = {
    "op": SELECTIVE,
    "op-all-linears": {**SELECTIVE, "save_ops": ["attention", "linears"]},
    "op-if-smaller": {**SELECTIVE, "save_ops": ["attention_if_smaller", "half_linears"]},
    "op-by-name": {**SELECTIVE, "save_ops": ["aten.silu.default", "aten.mm.default"]},
    "op-nothing": {**SELECTIVE, "save_ops": []},
    "every-second": {"mode": "selective", "selective_ac_option": "2"},
    "full": {"mode": "full"},
}


@pytest.mark.parametrize("recipe", ["mxfp8", "bf16"])
@pytest.mark.parametrize("policy", fast_first(POLICIES))
def test_loss_and_gradients_equal_those_without_checkpointing_in_every_bit(results, recipe, policy):
    plain, other = results(recipe, mode="none"), results(recipe, **POLICIES[policy])
    assert torch.equal(other.loss, plain.loss)
    for got, wanted in zip(other.gradients, plain.gradients, strict=True):
        assert torch.equal(got, wanted)


CALLS = {
    "op": LAYERS,
    "op-all-linears": LAYERS,
    "op-if-smaller": LAYERS,
    "op-by-name": 2 * LAYERS,
    "op-nothing": 2 * LAYERS,
    "every-second": LAYERS + 1,
    "full": 2 * LAYERS,
}


@pytest.mark.parametrize("policy", fast_first(CALLS))
def test_attention_runs_forward_as_often_as_the_policy_says_and_backward_once(results, policy):
    result = results(**POLICIES[policy])
    assert result.calls[ATTENTION] == CALLS[policy]
    assert result.calls[BACKWARD] == LAYERS
    assert result.calls[HEAD] == 1


@pytest.mark.slow
def test_linears_are_recomputed_all_half_or_not_at_all(results):
    plain = results(mode="none").calls[MM]
    in_blocks = 7 * LAYERS
    assert results(mode="full").calls[MM] == plain + in_blocks
    assert results(**POLICIES["op-all-linears"]).calls[MM] == plain
    assert results(**POLICIES["op"]).calls[MM] == plain + 3 * LAYERS  # 4 of 7 are kept


def test_full_keeps_less_than_op_and_op_less_than_none(results):
    full, op, plain = (results(**s) for s in (POLICIES["full"], SELECTIVE, {"mode": "none"}))
    assert 0 < full.kept_bytes < op.kept_bytes < plain.kept_bytes
    assert full.peak_bytes <= op.peak_bytes <= plain.peak_bytes
    assert full.peak_bytes < plain.peak_bytes


@pytest.mark.slow
def test_op_keeps_codes_and_scales_and_no_query_key_or_value(results):
    """Beyond the blocks' inputs: attention's saved operands and nothing else when alone."""
    alone = results(**SELECTIVE, save_ops=["attention"])
    nothing = results(**POLICIES["op-nothing"])
    N, H, J, D = ROWS * TOKENS, 4, 2, 32
    output_and_lse = N * H * (D * 4 + 4)
    codes_and_scales = N * (H + 2 * J) * (D + 1)
    assert alone.kept_bytes - nothing.kept_bytes == LAYERS * (output_and_lse + codes_and_scales)


@pytest.mark.parametrize(
    ("recipe", "smaller"),
    [("bf16", True), ("mxfp8", True), ("nvfp4_mixed", True), ("nvfp4_full", False)],
)
def test_saved_operands_are_compared_with_bf16_query_key_and_value(recipe, smaller):
    spec = getattr(AttentionSpec, recipe)(mask="causal").encode()
    assert saved_is_smaller(spec, heads=4, kv_heads=2, dim=64) is smaller


@pytest.mark.slow
def test_larger_operands_are_recomputed_where_that_is_asked_for(results):
    section = {**SELECTIVE, "save_ops": ["attention_if_smaller"]}
    assert results("nvfp4_full", **section).calls[ATTENTION] == 2 * LAYERS
    assert results("nvfp4_full", **SELECTIVE).calls[ATTENTION] == LAYERS


@pytest.mark.slow
def test_shapes_of_named_layers_are_recomputed(results):
    section = {**POLICIES["op-all-linears"]}
    section["per_op_sac_force_recompute_mm_shapes_by_fqns"] = ["feed_forward.w2"]
    plain = results(mode="none").calls[MM]
    assert results(**section).calls[MM] == plain + LAYERS
    layers = build("bf16").layers
    with pytest.raises(ValueError, match=r"layers.0.feed_forward, a FeedForward"):
        forced_shapes(layers, ["feed_forward"])


@pytest.mark.parametrize("name", ["atention", "aten.silu", "aten.nothing.default", "a.b.c.d", ""])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(ValueError, match="half_linears"):
        ops_of(name)


@pytest.mark.compile
@pytest.mark.slow
def test_compiled_op_policy_runs_attention_forward_once(inputs, monkeypatch):
    """Under compile the policy is the partitioner's; the custom op stays visible."""
    model = build("mxfp8")
    plain = Result(model, {"mode": "none"}, inputs)
    config = CONFIG()
    config.activation_checkpoint.mode = "selective"
    config.activation_checkpoint.selective_ac_option = "op"
    config.activation_checkpoint.preserve_rng_state = False
    apply_activation_checkpointing(model, config, compiled=True)
    for name, block in model.layers.named_children():
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        model.layers.register_module(name, compiled)
    tokens, offsets, labels = inputs
    model(tokens, cu_seqlens=offsets, labels=labels).backward()
    model.zero_grad()
    calls = []

    def counted(*args):
        calls.append(1)
        return forward_reference(*args)

    monkeypatch.setattr(attention_api, "forward_reference", counted)
    model(tokens, cu_seqlens=offsets, labels=labels).backward()
    assert len(calls) == LAYERS
    for got, p in zip(plain.gradients, model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, got)


def saved_bytes_and_gradients(model, inputs):
    """Bytes that autograd keeps of a forward, and the gradients."""
    tokens, offsets, labels = inputs
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens, cu_seqlens=offsets, labels=labels)
    loss.backward()
    return sum(storages.values()), [p.grad.clone() for p in model.parameters()]


def test_a_memory_budget_knows_what_attention_costs():
    count_attention()
    q = torch.randn(64, 4, 32)
    offsets = torch.tensor([[0, 32], [0, 32]], dtype=torch.int32)
    spec = AttentionSpec.bf16(mask="causal")
    with FlopCounterMode(display=False) as counter:
        attention_api.attention_packed(q, q, q, offsets, spec=spec, impl="reference")
    # two products of half of 32 x 32 pairs, a multiplication and an addition each
    assert counter.get_total_flops() == 2 * 2 * 2 * (32 * 32 // 2) * 4 * 32


@pytest.mark.compile
@pytest.mark.slow
def test_a_smaller_memory_budget_keeps_less_and_gives_the_same_gradients(inputs):
    plain = build("mxfp8")
    start = torch._functorch.config.activation_memory_budget
    kept, gradients = {}, {}
    try:
        for budget in (0.0, 1.0):
            model = copy.deepcopy(plain)
            config = CONFIG()
            config.activation_checkpoint.mode = "memory_budget"
            config.activation_checkpoint.memory_budget = budget
            apply_activation_checkpointing(model, config, compiled=True)
            torch._dynamo.reset()
            for name, block in model.layers.named_children():
                backend = "aot_eager_decomp_partition"
                compiled = torch.compile(block, backend=backend, fullgraph=True)
                model.layers.register_module(name, compiled)
            kept[budget], gradients[budget] = saved_bytes_and_gradients(model, inputs)
    finally:
        torch._functorch.config.activation_memory_budget = start
        torch._dynamo.reset()
    assert kept[0.0] < kept[1.0]
    _, wanted = saved_bytes_and_gradients(plain, inputs)
    for budget in kept:
        for got, reference in zip(gradients[budget], wanted, strict=True):
            torch.testing.assert_close(got, reference)
