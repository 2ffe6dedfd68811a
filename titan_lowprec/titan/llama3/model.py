"""The model: TorchTitan's Llama with our attention and our head."""

from typing import Any, cast

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torchtitan.models.llama3.model.model import Attention, Transformer, TransformerBlock

from titan_lowprec.ops.attention.api import Impl as AttentionImpl
from titan_lowprec.ops.attention.api import attention_packed
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.ops.cross_entropy.api import VocabularyShard, linear_cross_entropy
from titan_lowprec.shapes import Float, Int, Int32, Tensor
from titan_lowprec.titan.llama3.args import LowprecLlamaArgs
from titan_lowprec.titan.llama3.rotary import rotate, rotation_of


class LowprecAttention(Attention):
    """Llama attention over packed documents.

    Takes the place that TorchTitan gives to ``attention_masks`` for the rows' ``cu_seqlens``, and
    that of ``freqs_cis`` for the rotation of each token (``LowprecLlama.rotation``).
    """

    def __init__(self, layer_id: int, model_args: LowprecLlamaArgs) -> None:
        super().__init__(model_args)
        plan = model_args.attention
        self.spec = AttentionSpec.decode(plan.layer_spec(layer_id))
        self.impl: AttentionImpl = plan.impl

    def forward(
        self,
        x: Float[Tensor, "B T E"],
        freqs_cis: Float[Tensor, "R T 2 D"],
        attention_masks: Int32[Tensor, "B M"],
        positions: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T E"]:
        del positions  # the rotation has them
        B, T, _ = x.shape
        D = self.head_dim
        # -1 heads: tensor parallel may have sharded them
        q_BTHD, k_BTJD, v_BTJD = (w(x).view(B, T, -1, D) for w in (self.wq, self.wk, self.wv))
        q_BTHD, k_BTJD = rotate(q_BTHD, freqs_cis), rotate(k_BTJD, freqs_cis)
        out = attention_packed(
            q_BTHD.flatten(0, 1),
            k_BTJD.flatten(0, 1),
            v_BTJD.flatten(0, 1),
            attention_masks,
            spec=self.spec,
            impl=self.impl,
        )
        return self.wo(out.out_NHD.reshape(B, T, -1))


class LowprecHead(nn.Linear):
    """Output projection that can return the summed cross-entropy instead of logits.

    With labels, logits exist in chunks only. Called through the module, so that FSDP gathers the
    weight once for it. Under tensor parallelism each rank holds, and keeps, a part of the
    vocabulary; labels are a keyword there, as TorchTitan's hooks pass on one positional argument.
    """

    def __init__(self, model_args: LowprecLlamaArgs) -> None:
        super().__init__(model_args.dim, model_args.vocab_size, bias=False)
        self.model_args = model_args

    def forward(
        self, x: Float[Tensor, "B T E"], *, labels: Int[Tensor, "B T"] | None = None
    ) -> Tensor:
        if labels is None:
            return super().forward(x)
        if not isinstance(x, DTensor):
            return self._loss_sum(x, self.weight, labels, None)
        # TorchTitan's hooks made x whole on every rank and expect a DTensor back. The op's
        # gradient of x is the sum over ranks already, hence Replicate: no second reduction.
        weight, mesh = cast(DTensor, self.weight), x.device_mesh
        loss_sum = self._loss_sum(
            x.to_local(grad_placements=(Replicate(),)),
            weight.to_local(),
            labels,
            VocabularyShard.of_group(weight.shape[0], mesh.get_group()),
        )
        return DTensor.from_local(loss_sum, mesh, (Replicate(),), run_check=False)

    def _loss_sum(
        self,
        x: Float[Tensor, "B T E"],
        weight_VE: Float[Tensor, "V E"],
        labels: Int[Tensor, "B T"],
        shard: VocabularyShard | None,
    ) -> Tensor:
        args = self.model_args
        loss_sum, _, _ = linear_cross_entropy(
            x.flatten(0, 1),
            weight_VE.to(x.dtype),
            labels.flatten(),
            ignore_index=-100,
            chunk_rows=args.loss_chunk_rows,
            z_loss=args.loss_z_loss,
            softcap=args.loss_softcap or None,
            token_weight_N=None,
            impl=args.loss_head_impl,
            shard=shard,
        )
        return loss_sum


class LowprecLlama(Transformer):
    """Llama 3 for packed documents, low-precision attention and fp32-reduction loss."""

    def __init__(self, model_args: LowprecLlamaArgs) -> None:
        super().__init__(model_args)
        for layer_id in range(model_args.n_layers):
            block = cast(TransformerBlock, self.layers[str(layer_id)])
            block.attention = LowprecAttention(layer_id, model_args)
        self.output = LowprecHead(model_args)

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Initialise as TorchTitan does, on the CPU independently of the number of processes.

        DTensor has no sharded random generator for CPU meshes: each rank would draw the same
        numbers for its shard. There, an unsharded twin is initialised and then sharded.
        """
        weight = self.tok_embeddings.weight
        if not (isinstance(weight, DTensor) and weight.device.type == "cpu"):
            super().init_weights(buffer_device)
            return
        twin = LowprecLlama(cast(LowprecLlamaArgs, self.model_args))
        Transformer.init_weights(twin)
        values = dict(twin.named_parameters())
        for name, parameter in self.named_parameters():
            sharded = cast(DTensor, parameter)
            value = values[canonical_name(name)].to(sharded.dtype)
            sharded.copy_(distribute_tensor(value, sharded.device_mesh, sharded.placements))
        self.freqs_cis = twin.freqs_cis

    def rotation(
        self, positions: Int[Tensor, "B T"] | None, *, tokens: int
    ) -> Float[Tensor, "R T 2 D"]:
        """What every layer takes as ``freqs_cis``: ``(B, T, 2, D)``, or one row for all."""
        return rotation_of(self.freqs_cis, positions, tokens=tokens)

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        attention_masks: Any = None,
        positions: Int[Tensor, "B T"] | None = None,
        *,
        cu_seqlens: Int32[Tensor, "B M"] | None = None,
        document_ids: Int32[Tensor, "B T"] | None = None,
        block_index: Int32[Tensor, "B T"] | None = None,
        labels: Int[Tensor, "B T"] | None = None,
    ) -> Tensor:
        """Logits, or with labels the summed cross-entropy.

        Args:
            tokens: Token ids.
            attention_masks: Not used; masks follow from ``cu_seqlens``.
            positions: Position of each token in its document.
            cu_seqlens: Offsets of each row's documents, padded by repeating the last. Without it
                each row is one document.
            document_ids: Per-token metadata of the batch; attention derives it from ``cu_seqlens``.
            block_index: Likewise.
            labels: Next tokens, -100 where none. Given, the loss is computed in the head.

        Returns:
            Logits ``(B, T, V)`` or a fp32 scalar.
        """
        del attention_masks, document_ids, block_index
        if cu_seqlens is None:
            B, T = tokens.shape
            cu_seqlens = torch.tensor([0, T], dtype=torch.int32, device=tokens.device).repeat(B, 1)
        h = self.tok_embeddings(tokens)
        rotation = self.rotation(positions, tokens=tokens.shape[1])
        for layer in self.layers.values():
            h = layer(h, rotation, attention_masks=cu_seqlens)
        h = self.norm(h)
        return self.output(h) if labels is None else self.output(h, labels=labels)


def canonical_name(name: str) -> str:
    """A parameter's name without the wrappers of compile and activation checkpointing."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
