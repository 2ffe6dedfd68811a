"""The trainer's loss of a draft against loops over blocks in float64, and its bookkeeping."""

import math

import pytest
import torch

from tests.models.dflash.independent import independent_block
from titan_lowprec.models.dflash.anchors import AnchorSampler
from titan_lowprec.models.dflash.feature_loader import collate
from titan_lowprec.models.dflash.features import FeatureRecord
from titan_lowprec.models.dflash.hub import hub_config
from titan_lowprec.titan.dflash.batch import AnchoredLoader, learned_tokens, with_anchors
from titan_lowprec.titan.dflash.model import TitanDraft
from titan_lowprec.titan.dflash.objective import DraftObjective

IGNORED = -100


def make_batch(*rows, tokens=48, seed=0, first_row=0):
    """Rows of documents with random tokens and anchors."""
    generator = torch.Generator().manual_seed(seed)
    records = []
    for lengths in rows:
        n = sum(lengths)
        numbers = torch.arange(len(lengths), dtype=torch.int32)
        records.append(
            FeatureRecord(
                input_ids_S=torch.randint(2, 2048, (n,), generator=generator),
                loss_mask_S=torch.ones(n, dtype=torch.bool),
                document_S=torch.repeat_interleave(numbers, torch.tensor(lengths)),
                features_SO=torch.zeros(n, 0),
            )
        )
    inputs, labels = collate(records, row_tokens=tokens, max_documents=8)
    del inputs["loss_mask"], inputs["features"]
    sampler = AnchorSampler(seed=1, slots=4)
    return with_anchors(
        (inputs, labels), sampler, first_row=first_row, total_rows=first_row + len(rows)
    )


@pytest.fixture
def draft(parse, resolve, make_target):
    """``draft(*overrides)``: objective and model over a random target."""

    def make(*overrides):
        config = parse(*overrides)
        args, target = resolve(config), make_target(config)
        objective = DraftObjective(args, config, target=target, tables=target.tables)
        model = TitanDraft(args)
        with torch.no_grad():
            model.init_weights()
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(5)  # so that everything a block sees has an effect
        return objective, model

    return make


def truth(objective, model, batch):
    """Loss and gradients by loops over rows, anchors and slots."""
    inputs, _ = batch
    args, tables = objective.draft, objective.tables
    config = hub_config(args, dtype=torch.float64, max_positions=64)
    weights = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    features = objective.features(inputs).double()
    total, weight_sum = torch.zeros((), dtype=torch.float64), 0.0
    for b in range(len(features)):
        document = inputs["document_ids"][b].tolist()
        tokens = inputs["input"][b]
        slots = zip(inputs["anchor_position"][b], inputs["anchor_keep"][b], strict=True)
        for anchor in [int(a) for a, keep in slots if keep]:
            begin = document.index(document[anchor])
            block = torch.full((args.block_tokens,), args.mask_id)
            block[0] = tokens[anchor]
            embedded = tables.embed_VE[block].double()
            hidden = independent_block(config, weights, features[b, begin:anchor], embedded)
            log_p = (hidden @ tables.head_VE.double().T).log_softmax(-1)
            for k in range(1, args.block_tokens):
                t = anchor + k
                if t < len(document) and document[t] == document[anchor]:
                    w = math.exp(-(k - 1) / args.gamma)
                    total = total - w * log_p[k, tokens[t]]
                    weight_sum += w
    loss = total / weight_sum
    loss.backward()
    return loss.detach(), {n: w.grad for n, w in weights.items()}


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_loops_over_blocks(draft):
    objective, model = draft()
    batch = make_batch((20, 28), (5, 3, 30))
    denominator = objective.step_denominator([batch], torch.device("cpu"))
    loss = objective.loss_sum(model, *batch) / denominator
    loss.backward()
    expected, gradients = truth(objective, model, batch)
    torch.testing.assert_close(loss.detach().double(), expected, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        scale = gradients[name].abs().max()
        torch.testing.assert_close(
            parameter.grad.double() / scale, gradients[name] / scale, rtol=1e-3, atol=1e-4
        )


@pytest.mark.slow
def test_micro_batches_add_up_and_rows_without_anchors_add_nothing(draft):
    objective, model = draft()
    rows = ((20, 28), (48,), (1, 1, 1))
    parts = [make_batch(row, seed=n, first_row=n) for n, row in enumerate(rows)]
    assert int(parts[2][0]["anchor_keep"].sum()) == 0
    whole = {name: torch.cat([inputs[name] for inputs, _ in parts]) for name in parts[0][0]}
    labels = torch.cat([p[1] for p in parts])
    device = torch.device("cpu")
    denominator = objective.step_denominator(parts, device)
    assert torch.equal(denominator, objective.step_denominator([(whole, labels)], device))
    sums = [objective.loss_sum(model, *part) for part in parts]
    torch.testing.assert_close(sum(sums), objective.loss_sum(model, whole, labels))
    assert float(sums[2].detach()) == 0.0
    sums[2].backward()
    assert all(float(p.grad.abs().max()) == 0 for p in model.parameters()), "connected, and zero"
    # a step without any anchor is 0 / 1
    assert float(objective.step_denominator([parts[2]], device)) == 1.0


@pytest.mark.slow
def test_dpace_divides_by_blocks_and_weighs_by_confidence(draft):
    objective, model = draft("--dflash.objective=dpace")
    batch = make_batch((20, 28), (48,))
    assert float(objective.step_denominator([batch], torch.device("cpu"))) == 8
    loss = objective.loss_sum(model, *batch)
    objective.job_config.dflash.objective = "decay"
    assert 0 < float(loss.detach()) != float(objective.loss_sum(model, *batch).detach())
    assert float(objective.step_denominator([batch], torch.device("cpu"))) != 8


@pytest.mark.slow
def test_features_from_disk_give_the_loss_of_the_target_in_the_process(draft):
    objective, model = draft()
    inputs, labels = make_batch((20, 28), (5, 3, 30))
    online = objective.loss_sum(model, inputs, labels)
    stored = objective.features(inputs)
    objective.target = None
    assert torch.equal(objective.loss_sum(model, inputs | {"features": stored}, labels), online)
    shifted = inputs | {"features": stored.roll(1, dims=1)}
    assert not torch.equal(objective.loss_sum(model, shifted, labels), online)


@pytest.mark.slow
def test_bf16_log_softmax_is_an_ablation_of_the_same_loss(draft):
    objective, model = draft()
    batch = make_batch((20, 28), (48,))
    exact = objective.loss_sum(model, *batch)
    objective.head = "logits_bf16"
    rounded = objective.loss_sum(model, *batch)
    relative = float(((rounded - exact).abs() / exact).detach())
    assert 0 < relative < 2e-2
    rounded.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
def test_acceptance_is_measured_when_it_is_due(draft):
    objective, model = draft("--dflash.acceptance_freq=3", "--training.steps=7")
    batch, device = make_batch((20, 28)), torch.device("cpu")
    measured = []
    for _ in range(7):
        objective.step_denominator([batch], device)
        objective.loss_sum(model, *batch)
        figures = objective.take_figures(device)
        assert figures["anchors"] == 4
        measured.append("acceptance_strict" in figures)
    assert measured == [True, False, True, False, False, True, True]
    assert len(figures["slot_accuracy"]) == 3
    assert 1.0 <= figures["acceptance_strict"] <= figures["acceptance_pass_through"] <= 4.0


def test_learned_tokens_follow_from_labels():
    document = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, -1]])
    x = IGNORED
    everything = torch.tensor([[7, 7, 7, x, 7, 7, x, x, x]])
    assert learned_tokens(everything, document).int().tolist() == [[1, 1, 1, 1, 1, 1, 1, 0, 0]]
    answers = torch.tensor([[x, 7, 7, x, x, 7, x, x, x]])
    assert learned_tokens(answers, document).int().tolist() == [[0, 0, 1, 1, 0, 0, 1, 0, 0]]


class Rows:
    """Loader of rows whose tokens count up."""

    batch_rows, rank, world_size = 2, 0, 1

    def __init__(self):
        self.at = 0

    def __next__(self):
        self.at += 1
        document = torch.zeros(2, 30, dtype=torch.int32)
        labels = torch.full((2, 30), self.at)
        return {"document_ids": document, "input": labels}, labels

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def close(self):
        pass


def test_resumed_loader_draws_the_anchors_that_would_have_come():
    def anchored():
        return AnchoredLoader(Rows(), AnchorSampler(seed=4, slots=5))

    whole = anchored()
    positions = [next(whole)[0]["anchor_position"] for _ in range(4)]
    first, resumed = anchored(), anchored()
    next(first), next(first)
    resumed.load_state_dict(first.state_dict())
    for expected in positions[2:]:
        assert torch.equal(next(resumed)[0]["anchor_position"], expected)
    assert not torch.equal(positions[0], positions[1])
    with pytest.raises(ValueError, match="saved by another model's run"):
        anchored().load_state_dict({"at": 1})
