"""Model arguments and flavors of ``llama3_lowprec``."""

from dataclasses import dataclass, field

import torch.nn as nn
from torchtitan.models.llama3.model.args import TransformerModelArgs

from titan_lowprec.ops.cross_entropy.api import Impl as HeadImpl
from titan_lowprec.titan.merged_config import MergedJobConfig
from titan_lowprec.titan.specs import AttentionPlan, attention_plan, resolve_head_impl


@dataclass
class LowprecLlamaArgs(TransformerModelArgs):
    """TorchTitan's Llama arguments and what our layers add to them."""

    rope_theta: float = 500000.0
    attention: AttentionPlan = field(default_factory=AttentionPlan)
    loss_softcap: float = 0.0
    loss_z_loss: float = 0.0
    loss_chunk_rows: int = 1024
    loss_head_impl: HeadImpl = "reference"

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    def update_from_config(self, job_config: MergedJobConfig, **kwargs: object) -> None:
        """Take sequence length, attention recipe and head options from the job file."""
        super().update_from_config(job_config, **kwargs)
        self.attention = attention_plan(job_config, head_dim=self.head_dim)
        self.loss_softcap = job_config.loss.softcap
        self.loss_z_loss = job_config.loss.z_loss
        self.loss_chunk_rows = job_config.loss.chunk_rows
        if job_config.loss.impl == "linear_chunked":
            self.loss_head_impl = resolve_head_impl()

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Parameters, and FLOPs per token of a row that is one causal document.

        Reported throughput uses ``titan.flops`` with the true document lengths instead.
        """
        from titan_lowprec.titan.flops import training_flops

        parameters = sum(parameter.numel() for parameter in model.parameters())
        embedding = self.vocab_size * self.dim
        flops = training_flops(
            matmul_parameters=parameters - embedding,
            tokens=seq_len,
            attention_pairs=seq_len * (seq_len + 1) // 2,
            n_heads=self.n_heads,
            head_dim=self.head_dim,
            n_layers=self.n_layers,
        )
        return parameters, flops // seq_len


FLAVORS: dict[str, LowprecLlamaArgs] = {
    # 2 CPU cores, minutes; the vocabulary of the bundled tokenizer
    "tiny": LowprecLlamaArgs(
        dim=128, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=2048, multiple_of=64
    ),
    "debug": LowprecLlamaArgs(
        dim=256, n_layers=6, n_heads=8, n_kv_heads=4, vocab_size=2048, multiple_of=256
    ),
    # FFN 8192; 1.50B parameters
    "1B": LowprecLlamaArgs(
        dim=2048, n_layers=16, n_heads=16, n_kv_heads=4, ffn_dim_multiplier=1.5, multiple_of=1024
    ),
    # FFN 5632, 16 KV heads: the model that stock TorchTitan 0.2.2 was timed on
    "stock1p35B": LowprecLlamaArgs(
        dim=2048, n_layers=16, n_heads=16, n_kv_heads=16, multiple_of=256
    ),
    "8B": LowprecLlamaArgs(
        dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=1024
    ),
}
