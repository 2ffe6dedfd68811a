"""Predict the step of a 1B recipe on 1 to 1,024 GPUs from the parts that were measured.

    python tools/predict_scaling.py

`tools/bench/results/scaling_h200.jsonl` has the step of one GPU with two microbatches, that of two
GPUs with the same rows, and the rates of collectives between two GPUs, for messages of a layer and
of the embedding; the lowest is taken. Not measured, printed above the tables: the optimizer's share
of the step (its bytes at copy speed), the rate across hosts and the latency of a hop.
`titan_lowprec/titan/step_time.py` is the model.
"""

import argparse
import dataclasses
import json
import statistics
from pathlib import Path

from titan_lowprec.titan.step_time import MeasuredParts, ShardedModel, markdown_table, predict

RECORDS = Path(__file__).resolve().parent / "bench" / "results" / "scaling_h200.jsonl"
# Groups: the embedding, 16 layers, final norm with the head. bf16 gathers, fp32 reductions.
LLAMA_1B = ShardedModel(
    parameters=1_498_482_688,
    first_group=128_256 * 2048,
    groups=18,
    gathers=1,
    gather_bytes=2,
    reduce_bytes=4,
)
GPUS_PER_HOST = 8
# Clipping reads gradients and writes them; fused AdamW reads four fp32 tensors and writes three.
UPDATE_BYTES = 10 * 4
COPY_RATE = 4.26e12
"""Bytes a second of a device-to-device copy on an H200, read and written."""
ROWS_PER_MICROBATCH, TOKENS_PER_ROW = 8, 2048


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--recipe", default="llama1b_mxfp8")
    parser.add_argument("--rows", type=int, default=512, help="rows of the global batch")
    parser.add_argument("--network-rate", type=float, default=40e9, help="bytes/s and GPU")
    parser.add_argument("--hop-us", type=float, default=4.0, help="latency of a hop of a ring")
    return parser.parse_args()


KEPT_WEIGHTS = ["--parallelism.fsdp_reshard_after_forward never"]


def step_s(records: list[dict], recipe: str, *, gpus: int, options: list[str]) -> float:
    """Median step of runs of two microbatches on one GPU, or one on each of two."""
    rows = 2 * ROWS_PER_MICROBATCH
    found = [
        one["step_s"]
        for one in records
        if one["op"] == "step"
        and (one["recipe"], one["gpus"], one["rows_per_step"]) == (recipe, gpus, rows)
        and one.get("options", []) == options
    ]
    if not found:
        raise SystemExit(
            f"{RECORDS}: no step of {recipe} on {gpus} GPUs with {rows} rows and options {options}"
        )
    return statistics.median(found)


def measured_parts(records: list[dict], arguments: argparse.Namespace) -> MeasuredParts:
    """Take the optimizer's bytes out of one GPU's step, and the lowest rate for the link.

    What two GPUs take beyond the model without it is ``sharding_s``.
    """
    update_s = UPDATE_BYTES * LLAMA_1B.parameters / COPY_RATE
    rates = [r["rate"] for r in records if r["op"] in ("all_gather", "reduce_scatter")]
    parts = MeasuredParts(
        compute_s=(step_s(records, arguments.recipe, gpus=1, options=[]) - update_s) / 2,
        sharding_s=0.0,
        update_s=update_s,
        fixed_s=0.0,
        link_rate=min(rates),
        network_rate=arguments.network_rate,
        hop_s=arguments.hop_us * 1e-6,
    )
    two = predict(
        parts, LLAMA_1B, gpus=2, shards=2, gpus_per_host=GPUS_PER_HOST,
        rows_per_step=2 * ROWS_PER_MICROBATCH, rows_per_microbatch=ROWS_PER_MICROBATCH,
        tokens_per_row=TOKENS_PER_ROW,
    )  # fmt: skip
    measured = step_s(records, arguments.recipe, gpus=2, options=KEPT_WEIGHTS)
    return dataclasses.replace(parts, sharding_s=measured - two.step_s)


def main() -> None:
    arguments = parse_arguments()
    records = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    parts = measured_parts(records, arguments)
    print(
        f"{arguments.recipe}: a microbatch of {ROWS_PER_MICROBATCH} rows on one GPU "
        f"{parts.compute_s * 1e3:.1f} ms, sharded {parts.sharding_s * 1e3:.1f} ms more, link "
        f"{parts.link_rate / 1e9:.0f} GB/s. Assumed: optimizer {parts.update_s * 1e3:.1f} ms, "
        f"{parts.network_rate / 1e9:.0f} GB/s a GPU across hosts, "
        f"{parts.hop_s * 1e6:.0f} us a hop.\n"
    )
    for title, shards_of, gpus in (
        ("Parameters sharded over all GPUs", lambda n: n, (1, 2, 4, 8, 16, 32, 64)),
        ("Shards of 8, replicas across hosts", lambda n: min(n, GPUS_PER_HOST), (16, 32, 64)),
    ):
        rows = [
            predict(
                parts, LLAMA_1B, gpus=n, shards=shards_of(n), gpus_per_host=GPUS_PER_HOST,
                rows_per_step=arguments.rows, rows_per_microbatch=ROWS_PER_MICROBATCH,
                tokens_per_row=TOKENS_PER_ROW,
            )
            for n in gpus
        ]  # fmt: skip
        print(f"{title}, {arguments.rows} rows a step:\n\n{markdown_table(rows)}\n")
    weak = [
        predict(
            parts, LLAMA_1B, gpus=n, shards=s, gpus_per_host=GPUS_PER_HOST,
            rows_per_step=n * ROWS_PER_MICROBATCH, rows_per_microbatch=ROWS_PER_MICROBATCH,
            tokens_per_row=TOKENS_PER_ROW,
        )
        for n, s in ((128, 8), (256, 8), (512, 8), (1024, 8), (1024, 1024))
    ]  # fmt: skip
    print(
        "More GPUs than the batch has microbatches, so one microbatch each and a larger batch "
        f"(shards of 8; last row: of 1,024):\n\n{markdown_table(weak)}"
    )


if __name__ == "__main__":
    main()
