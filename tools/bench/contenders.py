"""The trainers that ``step_versus_stock.py`` compares, and the text that they train on."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from step import CHECKPOINTING, FP8, ROOT, TENSORWISE, fp8_linears
from tokenizers import Tokenizer

from titan_lowprec.data.bundled import resolve_path

FLAVOR = "stock1p35B"
ROWS = {"2k": (8, 2048), "16k": (1, 16384), "64k": (1, 65536), "64k-packed": (1, 65536)}
"""Rows of a step and their tokens; the documents of "64k" are as long as its rows."""
IN_OPTIMIZER = ("--training.clip_where=optimizer",)
FAST = (*IN_OPTIMIZER, "--parallelism.fsdp_reshard_after_forward=never")


@dataclass(frozen=True)
class Plan:
    """Steps before the first block, steps of a block, blocks of a contender."""

    warm: int
    block: int
    rounds: int

    @property
    def steps(self) -> int:
        return self.warm + self.block * self.rounds


PLANS = {
    "2k": Plan(3, 6, 4),
    "16k": Plan(3, 6, 4),
    "64k": Plan(3, 3, 2),
    "64k-packed": Plan(3, 3, 4),
}


@dataclass(frozen=True)
class Contender:
    """One trainer: TorchTitan's own (``recipe`` None) or that of a recipe of ours."""

    rows: str
    recipe: str | None
    checkpointing: str = "none"
    graph: bool = False
    options: tuple[str, ...] = ()

    def arguments(self, text: Path, folder: str) -> list[str]:
        """Of the command line."""
        batch, tokens = ROWS[self.rows]
        shared = [
            f"--job.dump_folder={folder}",
            f"--model.flavor={FLAVOR}",
            f"--training.seq_len={tokens}",
            f"--training.local_batch_size={batch}",
            f"--training.global_batch_size={batch}",
            f"--training.steps={PLANS[self.rows].steps}",
            "--lr_scheduler.warmup_steps=20",
            *CHECKPOINTING[self.checkpointing],
            *self.options,
        ]
        if self.recipe is None:
            return [
                "--model.name=llama3",
                f"--model.hf_assets_path={resolve_path('bundled:tokenizer')}",
                "--training.dataset=bundled",
                f"--training.dataset_path={text}",
                "--compile.enable",
                "--optimizer.lr=3e-4",
                *([] if self.checkpointing != "none" else ["--activation_checkpoint.mode=none"]),
                *shared,
            ]
        return [
            f"--job.config_file={ROOT}/recipes/llama1b_{self.recipe}.toml",
            "--data.source=local",
            "--data.no-streaming",
            f"--data.paths={text}",
            f"--data.cache_dir={folder}/cache",
            "--lr_scheduler.total_steps=1000",
            "--checkpoint.no-enable",
            f"--graph.{'' if self.graph else 'no-'}enable",
            *shared,
        ]


WORKERS = ("--training.dataloader.num_workers=2", "--training.dataloader.prefetch_factor=4")
"""What our recipes have; long documents take TorchTitan's loader as long as a third of a step."""
MANY_DOCUMENTS = ("--data.max_documents=1024",)
CONTENDERS = {
    "2k-stock": Contender("2k", None),
    "2k-bf16": Contender("2k", "bf16", graph=True),
    "2k-mxfp8": Contender("2k", "mxfp8", graph=True),
    "2k-mxfp8-eager": Contender("2k", "mxfp8"),
    "2k-mxfp8-fsdp2": Contender(
        "2k", "mxfp8", graph=True, options=("--parallelism.one_process=fsdp2",)
    ),
    "2k-mxfp8-clip": Contender("2k", "mxfp8", graph=True, options=IN_OPTIMIZER),
    "2k-bf16-fast": Contender("2k", "bf16", "budget70", graph=True, options=FAST),
    "2k-mxfp8-fast": Contender("2k", "mxfp8", "budget70", graph=True, options=FAST),
    "2k-mxfp8-lean": Contender("2k", "mxfp8", "linears", graph=True),
    "2k-mxfp8-budget70": Contender("2k", "mxfp8", "budget70", graph=True),
    "2k-mxfp8-fp8linear": Contender("2k", "mxfp8", graph=True, options=FP8),
    "2k-mxfp8-fp8linear-all": Contender("2k", "mxfp8", graph=True, options=fp8_linears("rowwise")),
    "2k-mxfp8-fp8tensorwise": Contender("2k", "mxfp8", graph=True, options=TENSORWISE),
    "2k-mxfp8-fp8tensorwise-lean": Contender(
        "2k", "mxfp8", "linears", graph=True, options=TENSORWISE
    ),
    "16k-stock": Contender("16k", None, "full", options=WORKERS),
    "16k-bf16": Contender("16k", "bf16", "full", graph=True, options=MANY_DOCUMENTS),
    "16k-mxfp8": Contender("16k", "mxfp8", "full", graph=True, options=MANY_DOCUMENTS),
    "64k-packed-stock": Contender("64k-packed", None, "full", options=WORKERS),
    "64k-packed-bf16": Contender("64k-packed", "bf16", "full", options=MANY_DOCUMENTS),
    "64k-packed-mxfp8": Contender("64k-packed", "mxfp8", "full", options=MANY_DOCUMENTS),
    "64k-stock": Contender("64k", None, "full", options=WORKERS),
    "64k-bf16": Contender("64k", "bf16", "full"),
    "64k-mxfp8": Contender("64k", "mxfp8", "full"),
}


def write_text(path: Path, rows: str) -> Path:
    """The bundled text as JSON lines; for long rows, in documents of a row's tokens."""
    lines = Path(resolve_path("bundled:train")).read_text().splitlines()
    if rows == "64k":
        texts = [json.loads(line)["text"] for line in lines]
        documents = whole_rows(texts, ROWS[rows][1])
        lines = [json.dumps({"id": str(n), "text": text}) for n, text in enumerate(documents)]
    path.write_text("\n".join(lines) + "\n")
    return path


def whole_rows(texts: list[str], tokens: int) -> Iterator[str]:
    """Texts joined and cut so that each, with BOS and EOS, has ``tokens`` tokens or a few less."""
    tokenizer = Tokenizer.from_file(f"{resolve_path('bundled:tokenizer')}/tokenizer.json")
    tokenizer.no_truncation()
    counts = [len(e.ids) for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
    first = 0
    while sum(counts[first:]) > 1.1 * tokens:
        last, total = first, 0
        while total < 1.05 * tokens:
            total += counts[last]
            last += 1
        text = "\n\n".join(texts[first:last])
        encoded = tokenizer.encode(text, add_special_tokens=False)
        wanted = tokens - 2
        while len(encoded.ids) > wanted:  # a cut can split a word into more tokens
            text = text[: encoded.offsets[wanted - 1][1]]
            encoded = tokenizer.encode(text, add_special_tokens=False)
            wanted -= len(encoded.ids) > tokens - 2
        yield text
        first = last


def load_stock_text(path: str) -> Any:
    """What stock TorchTitan's loader reads."""
    from datasets import Dataset

    return Dataset.from_list([json.loads(line) for line in Path(path).read_text().splitlines()])


def sample_text(sample: dict[str, str]) -> str:
    """A function of the module, because the loader's workers get it pickled."""
    return sample["text"]


def teach_stock() -> None:
    """Give TorchTitan's own llama3 the model and the text, through its public tables."""
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS
    from torchtitan.models.llama3 import llama3_args
    from torchtitan.models.llama3.model.args import TransformerModelArgs

    llama3_args[FLAVOR] = TransformerModelArgs(
        dim=2048, n_layers=16, n_heads=16, vocab_size=128256, multiple_of=256,
        rope_theta=500000, attn_type="flex", attn_mask_type="block_causal",
    )  # fmt: skip
    DATASETS["bundled"] = DatasetConfig(
        path="", loader=load_stock_text, sample_processor=sample_text
    )
