"""Times update steps of DoRA with its norms formed once per update step against once per forward.

    python -m recipe_utils.benchmark.dora_norm
    python -m recipe_utils.benchmark.dora_norm --sizes 2048x2 --device cuda --dtype bf16

The embedded default's model with DoRA on all linear layers of its blocks, as wide and deep as asked for. Both ways
train the same model in turn, on packed rows of random documents, through recipe_utils.model.adapted_linear; the one
forms the norm of W + (alpha / r) B A in each forward, as torchtune does, and with activation checkpointing once more in
the backward.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torchtune import config, training
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.modules.peft import DoRALinear

from recipe_utils.benchmark.report import quartiles
from recipe_utils.data.microbatch import Microbatch, Targets
from recipe_utils.loss import LinearCrossEntropyLoss
from recipe_utils.loss.head import attach_head
from recipe_utils.model.adapted_linear import speed_up_adapters
from recipe_utils.model.adapters import freeze_base
from recipe_utils.model.document_mask import attend_within_documents
from recipe_utils.tune.registry import config_path

DOCUMENT_LENGTH = 128


def _forward_with_new_norm(layer: Any, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    layer._norm = None
    return forward(x)


class Contest:
    """A DoRA model with fresh weights, whose update steps run one way or the other.

    Args:
        size: ``EMBED_DIMxNUM_LAYERS``; the MLP is three times as wide.
        rank: of the adapters.
        longest_row: of all microbatches [tokens].
        checkpoints: recomputes each layer in the backward.
        device: of the model.
        dtype: of the model.
    """

    def __init__(
        self,
        size: str,
        rank: int,
        longest_row: int,
        checkpoints: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        embed_dim, num_layers = map(int, size.split("x"))
        cfg = OmegaConf.load(config_path("llama3_2/5M_lora_update_step")).model
        cfg.merge_with(
            {
                "embed_dim": embed_dim,
                "num_layers": num_layers,
                "intermediate_dim": 3 * embed_dim,
                "max_seq_len": longest_row,
                "use_dora": True,
                "lora_rank": rank,
                "lora_alpha": 2 * rank,
            }
        )
        torch.manual_seed(0)
        with training.set_default_dtype(dtype), device:
            self.model: nn.Module = config.instantiate(cfg)
        self.vocab_size, self.device = cfg.vocab_size, device
        freeze_base(self.model)
        attend_within_documents(self.model, device, longest_row)
        attach_head(self.model, LinearCrossEntropyLoss())
        self.layers = [m for m in self.model.modules() if isinstance(m, DoRALinear)]
        for layer in self.layers:
            nn.init.normal_(layer.lora_b.weight, std=0.02)
            layer.initialize_dora_magnitude()
        if checkpoints:
            training.set_activation_checkpointing(
                self.model, auto_wrap_policy={TransformerSelfAttentionLayer}
            )
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        speed_up_adapters(self.model, self.optimizer)
        self.keeping = [layer.forward for layer in self.layers]

    def seconds_of(self, microbatches: Sequence[Microbatch], keeps: bool) -> float:
        """Of one update step.

        Args:
            microbatches: on the model's device.
            keeps: the norms, until the optimizer steps.
        """
        for layer, keeping in zip(self.layers, self.keeping, strict=True):
            layer.forward = keeping if keeps else partial(_forward_with_new_norm, layer, keeping)
        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        wait()
        started = time.perf_counter()
        for microbatch in microbatches:
            sums = self.model(**microbatch.inputs, targets=microbatch.targets)
            (sums[0] * 1e-4).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        wait()
        return time.perf_counter() - started

    def make_microbatch(self, num_tokens: int, seed: int) -> Microbatch:
        """One row of documents of 128 tokens, every second of which is a target."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(self.vocab_size, (1, num_tokens), generator=generator)
        starts = range(0, num_tokens, DOCUMENT_LENGTH)
        lengths = [min(DOCUMENT_LENGTH, num_tokens - start) for start in starts]
        inputs = {
            "tokens": tokens.to(self.device),
            "input_pos": torch.cat([torch.arange(n) for n in lengths])[None].to(self.device),
            "document_lengths": [lengths],
        }
        positions = torch.arange(0, num_tokens, 2)
        return Microbatch(inputs, Targets(tokens.to(self.device), positions.to(self.device)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a markdown table with medians and quartiles.

    Args:
        arguments: of the command line; None takes the process's own.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sizes", nargs="+", default=["256x6", "1024x2"], help="embed_dim x layers"
    )
    parser.add_argument("--num_tokens", nargs="+", type=int, default=[128, 512, 2048])
    parser.add_argument("--num_microbatches", type=int, default=4, help="per update step")
    parser.add_argument("--num_update_steps", type=int, default=12, help="timed, each way")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    dtype = training.get_dtype(args.dtype, device)
    print(
        "| embed_dim x layers | tokens per microbatch | activation checkpointing "
        "| seconds per update step: each forward | kept | each forward / kept |"
    )
    print("| --- " * 6 + "|")
    for size in args.sizes:
        for checkpoints in (False, True):
            contest = Contest(size, args.rank, max(args.num_tokens), checkpoints, device, dtype)
            for num_tokens in args.num_tokens:
                microbatches = [
                    contest.make_microbatch(num_tokens, seed)
                    for seed in range(args.num_microbatches)
                ]
                formed, kept = _times(contest, microbatches, args.num_update_steps)
                ratios = [a / b for a, b in zip(formed, kept, strict=True)]
                low, middle, high = quartiles(ratios)
                print(
                    f"| {size} | {num_tokens} | {'yes' if checkpoints else 'no'} "
                    f"| {statistics.median(formed):.4f} | {statistics.median(kept):.4f} "
                    f"| {low:.2f} **{middle:.2f}** {high:.2f} |",
                    flush=True,
                )


def _times(
    contest: Contest, microbatches: Sequence[Microbatch], num_update_steps: int
) -> tuple[list[float], list[float]]:
    """Seconds of each update step, without and with kept norms; which comes first changes every time."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for step in range(1 + num_update_steps):
        for keeps in (step % 2 == 0, step % 2 == 1):
            seconds[keeps].append(contest.seconds_of(microbatches, keeps))
    return seconds[False][1:], seconds[True][1:]  # the first warms up


if __name__ == "__main__":
    main()
