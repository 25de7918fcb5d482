"""Times update steps of DoRA with its norms formed once per update step against once per forward.

    python -m recipe_utils.benchmark.dora_norm
    python -m recipe_utils.benchmark.dora_norm --sizes 2048x2 --device cuda --dtype bf16

The embedded default's model with DoRA on all linear layers of its blocks, as wide and deep as asked for. The same model
is trained three ways in turn, on packed rows of random documents: with torchtune's own layers; with those of
recipe_utils.model.adapters.adapted_linear, forming the norm of W + (alpha / r) B A in each forward, and with activation
checkpointing once more in the backward; and with them as the recipe does, which keeps the norm until the optimizer steps.
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
from recipe_utils.data.loader.microbatch import Microbatch, Targets
from recipe_utils.loss import LinearCrossEntropyLoss
from recipe_utils.loss.attach_loss import attach_loss
from recipe_utils.model.adapters.adapted_linear import speed_up_adapters
from recipe_utils.model.adapters.adapters import freeze_base
from recipe_utils.model.attention.document_mask import attend_within_documents
from recipe_utils.optim.optimizer import trained_parameters
from recipe_utils.tune.registry import config_path

DOCUMENT_LENGTH = 128
WAYS = ("torchtune", "each_forward", "kept")


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
        attach_loss(self.model, LinearCrossEntropyLoss())
        self.layers = [m for m in self.model.modules() if isinstance(m, DoRALinear)]
        for layer in self.layers:
            nn.init.normal_(layer.lora_b.weight, std=0.02)
            layer.initialize_dora_magnitude()
        if checkpoints:
            training.set_activation_checkpointing(
                self.model, auto_wrap_policy={TransformerSelfAttentionLayer}
            )
        trained = trained_parameters(self.model).values()
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        speed_up_adapters(self.model, self.optimizer)
        self.keeping = [layer.forward for layer in self.layers]

    def seconds_of(self, microbatches: Sequence[Microbatch], way: str) -> float:
        """Of one update step.

        Args:
            microbatches: on the model's device.
            way: one of :data:`WAYS`.
        """
        for layer, keeping in zip(self.layers, self.keeping, strict=True):
            layer.forward = {
                "torchtune": partial(DoRALinear.forward, layer),
                "each_forward": partial(_forward_with_new_norm, layer, keeping),
                "kept": keeping,
            }[way]
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
        "| seconds per update step | torchtune's / ours | norm in each forward / ours |"
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
                seconds = _times(contest, microbatches, args.num_update_steps)
                over_kept = [_ratio(seconds[way], seconds["kept"]) for way in WAYS[:2]]
                print(
                    f"| {size} | {num_tokens} | {'yes' if checkpoints else 'no'} "
                    f"| {statistics.median(seconds['kept']):.4f} | {' | '.join(over_kept)} |",
                    flush=True,
                )


def _ratio(seconds: list[float], over: list[float]) -> str:
    low, middle, high = quartiles([a / b for a, b in zip(seconds, over, strict=True)])
    return f"{low:.2f} **{middle:.2f}** {high:.2f}"


def _times(
    contest: Contest, microbatches: Sequence[Microbatch], num_update_steps: int
) -> dict[str, list[float]]:
    """Seconds of each update step, each way; which comes first changes every time."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for step in range(1 + num_update_steps):
        for turn in range(len(WAYS)):
            way = WAYS[(step + turn) % len(WAYS)]
            seconds[way].append(contest.seconds_of(microbatches, way))
    return {way: of_way[1:] for way, of_way in seconds.items()}  # the first warms up


if __name__ == "__main__":
    main()
