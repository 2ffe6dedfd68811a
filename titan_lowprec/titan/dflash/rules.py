"""What a recipe with ``model.name = "dflash"`` must fulfil, before a device is touched."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from titan_lowprec.data.bundled import resolve_path
from titan_lowprec.models.dflash.args import PUBLISHED_GAMMA, check_taps
from titan_lowprec.models.dflash.features import read_index
from titan_lowprec.titan.config_types import DEGREES, MODEL, Job, Problem, Rule
from titan_lowprec.titan.dflash.args import DraftModelArgs, draft_args
from titan_lowprec.titan.dflash.choices import attention_on
from titan_lowprec.titan.dflash.vocabulary import read_vocabulary, vocabulary_of
from titan_lowprec.titan.dflash.weights import RANDOM, path_kind

DRAFT = "dflash"


def for_drafts(check: Callable[[Job], Iterator[Problem]]) -> Callable[[Job], Iterator[Problem]]:
    """A rule that other models are spared."""

    def checked(job: Job) -> Iterator[Problem]:
        if job.config.model.name == DRAFT:
            yield from check(job)

    checked.__doc__ = check.__doc__
    return checked


@for_drafts
def decay(job: Job) -> Iterator[Problem]:
    """A decay length, which has no default."""
    section = job.config.dflash
    if section.gamma == 0:
        known = PUBLISHED_GAMMA.get(section.block_tokens)
        remedy = f"the paper has {known:g}" if known else f"the paper has {PUBLISHED_GAMMA}"
        needs = f"be set, above 0, for blocks of {section.block_tokens} tokens"
        yield Problem("dflash.gamma", needs, section.gamma, remedy)


@for_drafts
def taps(job: Job) -> Iterator[Problem]:
    """Layers of the target, each once, the last one not among them."""
    chosen, layers = job.config.dflash.taps, job.model_args.n_layers
    if not chosen:
        return
    try:
        check_taps(chosen, target_layers=layers)
    except ValueError as error:
        needs = f"name layers 0 to {layers - 2} of the target, each once"
        yield Problem("dflash.taps", needs, chosen, str(error))


@for_drafts
def target(job: Job) -> Iterator[Problem]:
    """A target that is named, is the flavor's, and can run where it is asked to.

    It need not be there yet: a run looks for it before it builds anything (`require_weights`).
    """
    section, args = job.config.dflash, job.model_args
    path = Path(section.target_path)
    if not section.target_path or (path.exists() and path_kind(section.target_path) is None):
        yield Problem(
            "dflash.target_path",
            f"be a step of a checkpoint, a folder with *.safetensors, or {RANDOM!r}",
            section.target_path,
            "train the target first (llama_tiny_bf16.toml trains that of flavor tiny), or correct "
            "the path",
        )
    elif (path / "config.json").is_file():
        yield from hugging_face_target(section.target_path, args)
    if args.target_model == "offline" and section.features == "online":
        needs = f"be offline for {job.config.model.flavor}, whose target has no model here"
        yield Problem("dflash.features", needs, "online", "write features elsewhere")
    if section.shard_target and section.features == "offline":
        needs = "be false with dflash.features=offline, where no target is loaded"
        yield Problem("dflash.shard_target", needs, True, "set it to false")


def hugging_face_target(path: str, args: DraftModelArgs) -> Iterator[Problem]:
    """Sizes that the target's own configuration names."""
    content = json.loads((Path(path) / "config.json").read_text())
    content = content.get("text_config", content)
    shape = args.target
    expected = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.dim,
        "num_hidden_layers": shape.n_layers,
        "tie_word_embeddings": shape.tied,
    }
    for name, value in expected.items():
        if content.get(name, value) != value:
            needs = f"have {name}={value} in its config.json, as the flavor's target has"
            yield Problem("dflash.target_path", needs, content[name], "choose its model.flavor")
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    expected_kind = {"llama3": "llama3", "qwen3": "default"}.get(args.target_model, kind)
    if kind != expected_kind:
        needs = (
            f"have rope_type={expected_kind} in its config.json: TorchTitan's model has no other"
        )
        yield Problem("dflash.target_path", needs, kind, "use another target")
    theta = content.get("rope_theta", rope.get("rope_theta", shape.rope_theta))
    if theta != shape.rope_theta:
        needs = (
            f"have rope_theta={shape.rope_theta:g} in its config.json, as the flavor's target has"
        )
        yield Problem("dflash.target_path", needs, theta, "choose its model.flavor")


@for_drafts
def stored_rows(job: Job) -> Iterator[Problem]:
    """Rows on disk that are complete and belong to the flavor; they need not be there yet."""
    section = job.config.dflash
    offline = section.features == "offline"
    if offline and job.config.validation.enable:
        needs = "be false with dflash.features=offline: there is no target to run on new text"
        yield Problem("validation.enable", needs, True, "set it to false")
    if not section.features_path:
        if offline:
            needs = "name a folder that tools/dflash_features.py wrote, with features=offline"
            yield Problem("dflash.features_path", needs, "", "set it, or features to online")
        return
    if not Path(section.features_path).exists():
        return
    try:
        index = read_index(Path(section.features_path))
    except (ValueError, OSError) as error:
        needs = "be a folder that tools/dflash_features.py wrote to its end"
        yield Problem("dflash.features_path", needs, section.features_path, str(error))
        return
    identity, shape = index.identity, job.model_args.target
    found = (identity.vocab_size, identity.model_dim)
    if found != (shape.vocab_size, shape.dim):
        needs = f"have vocabulary and hidden size {(shape.vocab_size, shape.dim)}"
        yield Problem("dflash.features_path", needs, found, "write features of this target")
    if offline and not identity.tap_layers:
        needs = "hold features, and not tokens alone, with dflash.features=offline"
        yield Problem("dflash.features_path", needs, section.features_path, "write them")
    if index.longest > job.config.training.seq_len:
        needs = f"be at least {index.longest}, the longest record of dflash.features_path"
        yield Problem("training.seq_len", needs, job.config.training.seq_len, "raise it")
    yield from same_tokenizer(job, index.tokenizer_sha256)


def same_tokenizer(job: Job, sha256: str) -> Iterator[Problem]:
    """The tokenizer of stored rows; an import that does not know it has an empty hash."""
    folder = Path(resolve_path(job.config.data.tokenizer))
    if not sha256 or not (folder / "tokenizer.json").is_file():
        return
    if read_vocabulary(folder).sha256 != sha256:
        needs = "be the tokenizer that dflash.features_path was written with"
        yield Problem("data.tokenizer", needs, job.config.data.tokenizer, "name that one")


@for_drafts
def mask_token(job: Job) -> Iterator[Problem]:
    """A row of the embedding that data never contain, and everything else the draft refuses."""
    section = job.config.dflash
    if section.gamma == 0:
        return  # said already
    try:
        folder = Path(resolve_path(job.config.data.tokenizer))
        if not (folder / "tokenizer.json").is_file():
            return  # data.tokenizer says so
        draft_args(job.model_args, job.config, vocabulary_of(job.config))
    except (ValueError, OSError) as error:
        if "features:" in str(error) or "tap_layers" in str(error):
            return  # dflash.features_path or dflash.taps says so
        needs = "be a free row of the target's embedding"
        yield Problem("dflash.mask_id", needs, section.mask_id, str(error))


@for_drafts
def loss(job: Job) -> Iterator[Problem]:
    """Losses that a draft has."""
    section = job.config.loss
    if section.impl == "logits_fp32":
        needs = "be linear_chunked (or logits_bf16, the ablation) for a draft: all logits of a "
        needs += "step would not fit"
        yield Problem("loss.impl", needs, section.impl, "set it to linear_chunked")
    for name in ("z_loss", "softcap"):
        if getattr(section, name):
            needs = "be 0 for a draft: its head is the target's, as it is"
            yield Problem(f"loss.{name}", needs, getattr(section, name), "set it to 0")


@for_drafts
def attention(job: Job) -> Iterator[Problem]:
    """An attention that has a backward pass where it runs, in the type that it gets."""
    impl = attention_on(job.config, job.device_type)
    if impl.startswith("flex") and job.device_type == "cpu":
        needs = "be auto or a reference on a CPU, where FlexAttention has no backward pass"
        remedy = "set it to auto, or to reference_flex_bf16 or reference_flex_fp32"
        yield Problem("dflash.attention", needs, impl, remedy)
    elif impl == "flex_bf16" and job.config.training.mixed_precision_param != "bfloat16":
        needs = "not be flex_bf16 with training.mixed_precision_param=float32"
        yield Problem("dflash.attention", needs, impl, "use flex_fp32_ieee")


@for_drafts
def data(job: Job) -> Iterator[Problem]:
    """Documents in which a block may begin."""
    least = job.config.data.min_document_tokens
    if job.config.dflash.features == "online" and least < 2:
        needs = "be at least 2 for drafts: a document of one token has no candidate for an anchor"
        yield Problem("data.min_document_tokens", needs, least, "use 2 or more")


@for_drafts
def one_way_to_spread(job: Job) -> Iterator[Problem]:
    """Parallelism that drafts do not have."""
    degree = job.config.parallelism.tensor_parallel_degree
    if degree > 1:
        needs = "be 1 for drafts, which are spread over data-parallel ranks only"
        yield Problem("parallelism.tensor_parallel_degree", needs, degree, "set it to 1")
    if job.config.training.enable_cpu_offload:
        needs = "be false for drafts: the target's features are on the device"
        yield Problem("training.enable_cpu_offload", needs, True, "set it to false")
    if job.config.metrics.health_every:
        needs = "be 0 for drafts: the measured layers would be the target's"
        yield Problem("metrics.health_every", needs, job.config.metrics.health_every, "set it to 0")


@for_drafts
def graph(job: Job) -> Iterator[Problem]:
    """Steps that a CUDA graph can hold, and some that it may replay."""
    if not job.config.graph.enable:
        return
    section = job.config.dflash
    if section.acceptance_freq == 1:
        needs = "be above 1 with graph.enable: steps that count acceptance are not replayed"
        yield Problem("dflash.acceptance_freq", needs, 1, "raise it, or set graph.enable to false")
    if section.shard_target:
        needs = "be false with graph.enable: gathering the target was not proven under capture"
        yield Problem("dflash.shard_target", needs, True, "set one of them to false")


DRAFT_RULES = (
    Rule(("dflash.gamma", "dflash.block_tokens"), decay),
    Rule((*MODEL, "dflash.taps"), taps),
    Rule((*MODEL, "dflash"), target),
    Rule(
        (*MODEL, "dflash", "data.tokenizer", "training.seq_len", "validation.enable"), stored_rows
    ),
    Rule((*MODEL, "dflash", "data.tokenizer"), mask_token),
    Rule(("loss",), loss),
    Rule(("dflash.attention", "training.mixed_precision_param"), attention),
    Rule(("data.min_document_tokens", "dflash.features"), data),
    Rule(
        (*DEGREES, "training.enable_cpu_offload", "metrics"),
        one_way_to_spread,
    ),
    Rule(("graph.enable", "dflash.acceptance_freq", "dflash.shard_target"), graph),
)
