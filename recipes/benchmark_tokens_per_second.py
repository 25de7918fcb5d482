"""Compares the tokens per second of several trainers on the same update steps.

All baselines train the same model from the same weights on the same samples: torchtune's recipe,
this project's, Hugging Face's Trainer, and a bare loop as the upper bound. All run at once in
separate processes and take turns of one optimizer step, in an order that changes every step. Ratios
are taken step by step, so other load on the machine affects all baselines. ``in_turns=False`` runs
one after the other, for a GPU whose memory does not hold all.

    tune run benchmark_tokens_per_second --config llama3_2/5M_benchmark
    tune run benchmark_tokens_per_second --config llama3_2/5M_benchmark overrides.batch_size=8
    tune run benchmark_tokens_per_second --config llama3_2/1B_gpu_benchmark

Other configs: ``llama3_2/5M_lora_benchmark``, ``5M_dpo_benchmark``, ``5M_to_1M_KD_benchmark``,
``5M_policy_benchmark``. Keys of an entry of ``baselines`` override the recipe's config:
``baselines.in_order.gradient_accumulation_steps=2``, ``'~baselines.stock'``.
"""

import json
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, OmegaConf
from pydantic.dataclasses import dataclass
from tqdm import tqdm

from recipe_utils.benchmark import report
from recipe_utils.benchmark.baselines.kinds import DISTILLATION, PAIRS, POLICY
from recipe_utils.benchmark.baselines.start import write_fresh_adapters
from recipe_utils.benchmark.baselines.worker import write_spec
from recipe_utils.benchmark.flops import product_rate
from recipe_utils.benchmark.interleave import BaselineDiedError, Processes, RankReport
from recipe_utils.benchmark.lineup import Baseline, line_up, load_base_config, merged_with
from recipe_utils.cli.registry import RECIPES, config_path
from recipe_utils.parallel.process_group import world_size_from_env
from recipe_utils.parallel.ranks import resolve_device
from recipe_utils.settings.keys import AS_WRITTEN, STRICT, Count, FilePath, Positive
from recipe_utils.settings.problems import ConfigError, Problem, problems_with_folder
from recipe_utils.settings.read import read_settings
from recipe_utils.torchtune_names import instantiate, logger
from recipe_utils.training.command import entry_point

ARGUMENTS = sys.argv[1:]  # entry_point takes out those that remove keys
# Waits until the threads of the last baseline have stopped.
SETTLE_SECONDS = 0.02


@dataclass(frozen=True, config=STRICT)
class Settings:
    """Config keys of the benchmark."""

    output_dir: FilePath
    """Folder for the report and the output of the baselines."""
    baselines: Annotated[dict[str, Any], AS_WRITTEN]
    """Baselines: name -> `kind` (stock, update_step, hf_trainer, trl, or limit, a bare loop),
    `recipe` (a file of kind update_step; default: `update_step_recipe`) and overrides of the config."""
    update_step_recipe: Literal[
        "full_finetune_update_step",
        "full_dpo_update_step",
        "knowledge_distillation_update_step",
        "full_policy_update_step",
    ] = "full_finetune_update_step"
    """Recipe of the config. Only fine-tuning has an hf_trainer and a limit, only rollouts have a trl."""
    update_step_config: str | None = None
    """Config of `update_step_recipe` for all baselines, by name or path; null: `overrides` contain all its keys."""
    overrides: Annotated[dict[str, Any], AS_WRITTEN] | None = None
    """Overrides of the config for all baselines."""
    reference: str | None = None
    """Name of the baseline that ratios are taken over; null is the first one."""
    in_turns: bool = True
    """True: all baselines at once, in turns of an update step. False: each runs all its update steps of a round alone."""
    num_warmup_steps: Count = 1
    """Untimed update steps of each round. The first one includes loading."""
    num_update_steps: Count = 8
    """Timed update steps of each round."""
    nproc_per_node: Count = 1
    """Data-parallel processes of each baseline."""
    num_rounds: Count = 3
    """Number of rounds; each restarts all baselines."""
    step_timeout_seconds: Positive = 1800
    """Maximum time of a baseline's turn [s]."""

    @property
    def num_steps(self) -> int:
        """Update steps of each round."""
        return self.num_warmup_steps + self.num_update_steps

    def problems(self) -> Iterator[Problem]:
        """Yields problems of the launch and of the names of baselines."""
        if (world_size := world_size_from_env()) > 1:
            yield Problem(
                f"--nproc_per_node {world_size}",
                f"the benchmark starts processes itself; set the key nproc_per_node={world_size} instead",
            )
        yield from problems_with_folder("output_dir", self.output_dir)
        if not self.baselines:
            yield Problem("baselines", "there are none; set it to names with a kind each")
        elif self.reference is not None and self.reference not in self.baselines:
            text = f"no entry of baselines has this name; set it to one of {', '.join(self.baselines)}"
            yield Problem("reference", text, self.reference)


class BenchmarkTokensPerSecond:
    """Runs the baselines of a config in turns and writes a report."""

    def __init__(self, cfg: DictConfig) -> None:
        self.settings = settings = read_settings(cfg, Settings)
        given = settings.update_step_config
        base = merged_with(OmegaConf.create() if given is None else load_base_config(given), settings.overrides or {})
        self.device = resolve_device(base.get("device"))
        counts = settings.nproc_per_node, settings.num_steps
        self.baselines, self.missing = line_up(
            settings.update_step_recipe, base, settings.baselines, settings.output_dir, *counts
        )
        self.reference = settings.reference or next(iter(self.baselines), "")
        if self.reference not in self.baselines:
            reason = self.missing.get(self.reference, "no baseline can run")
            raise ConfigError(Problem("reference", f"{reason}; set another", self.reference))
        of_reference = self.baselines[self.reference].config
        others = (name for name, each in self.baselines.items() if each.config["model"] != of_reference["model"])
        self.other_models = list(others)
        self.product_size, self.product_rate = product_rate(self.device, of_reference["dtype"])
        self.steps: list[report.TimedStep] = []
        self.losses: dict[str, list[list[float]]] = {name: [] for name in self.baselines}

    def write_start_adapters(self) -> None:
        """Draws initial adapters once for all baselines of the same model."""
        drawing = [each.config for each in self.baselines.values() if each.draws_adapters]
        files = {each["checkpointer"]["adapter_checkpoint"]: each for each in drawing}
        for with_adapters in files.values():
            write_fresh_adapters(OmegaConf.create(with_adapters))

    def run_round(self, number: int) -> None:
        """Starts all baselines, runs them in turns and ends them."""
        running: dict[str, Processes] = {}
        losses: dict[str, list[float]] = {}
        num_steps = self.settings.num_steps
        names = [name for name in self.baselines if name not in self.missing]
        turns = [(step, name) for name in names for step in range(1, num_steps + 1)]
        if self.settings.in_turns:
            rotated = {
                step: names[step % len(names) :] + names[: step % len(names)] for step in range(1, num_steps + 1)
            }
            turns = [(step, name) for step, in_order in rotated.items() for name in in_order]
        bar = tqdm(total=len(turns), desc=f"round {number}/{self.settings.num_rounds}")
        try:
            # Those that wait for their first turn import their modules, and have no memory on the device yet.
            for name in names:
                running[name] = self._start(self.baselines[name], number)
                losses[name] = []
            for step, name in turns:
                bar.update(1)
                if name not in running:
                    continue
                time.sleep(SETTLE_SECONDS)
                try:
                    seconds, reports = running[name].take_turn()
                    losses[name] += reports[0].losses
                    bar.set_postfix_str(f"{name} {seconds:.3f} s")
                    if step > self.settings.num_warmup_steps:
                        self.steps.append(self._timed_step(number, step, name, seconds, reports))
                    if step == num_steps:
                        losses[name] += running[name].finish()
                except BaselineDiedError as error:
                    self._continue_without(name, error)
                    running.pop(name).kill()
        finally:
            bar.close()
            for processes in running.values():
                processes.kill()
        for name, of_round in losses.items():
            self.losses[name].append(of_round)

    def write_report(self) -> None:
        """Prints the tables and writes benchmark.md and benchmark.json."""
        first = next(iter(self.baselines.values()))
        losses = self.losses
        if first.recipe == DISTILLATION:  # losses compare in the first update step only
            losses = {name: [each[:1] for each in rounds] for name, rounds in losses.items()}
        peak = self.product_rate * (self.settings.nproc_per_node if self.device.type == "cuda" else 1)
        summaries = report.summarize(self.steps, losses, self.reference, self.other_models, peak)
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        command, versions = _command(), report.versions()
        machine = report.machine_name(self.device)
        shown_versions = ", ".join(f"{name} {number}" for name, number in versions.items())
        parts = [
            "# Target tokens per second",
            f"{machine}, processes: {self.settings.nproc_per_node}, {first.config['dtype']}, batch "
            f"{first.config['batch_size']} x {first.config['gradient_accumulation_steps']}; rounds: "
            f"{self.settings.num_rounds}, timed update steps in each: {self.settings.num_update_steps}. "
            f"{date}, {shown_versions}.",
            f"```bash\n{command}\n```",
            report.throughput_table(summaries, self.reference, self.missing),
            "A ratio is taken over the reference in the same round and update step. "
            f"{report.samples_sentence(self.steps, summaries)}",
        ]
        if not self.settings.in_turns:
            parts.append("The baselines ran one after the other, each alone on the device.")
        if any(row.share_of_product for row in summaries):
            parts.append(
                f"Share of the product: FLOPs of an update step without padding and recomputation (6 per weight and "
                "token, in the output layer per weight and target; causal attention) per second, over those of a "
                f"{first.config['dtype']} product of {self.product_size} x {self.product_size} matrices timed before "
                f"the first round: {self.product_rate / 1e12:.4g} TFLOP/s."
            )
        if first.recipe == PAIRS:
            parts.append(
                "Targets are those of both answers. Real tokens are those that go into the trained model: a shared "
                "prefix counts once."
            )
        if first.recipe == POLICY:
            parts.append("Real tokens are those that go into the trained model: a shared prompt counts once.")
        if first.recipe == DISTILLATION:
            parts.append(
                "The loss deviation is that of the first update step: stock divides the mean of each microbatch by the "
                "number of tokens of the update step, so its weights differ afterwards. Losses include the teacher's "
                "entropy, as stock's do."
            )
        if self.settings.nproc_per_node > 1:
            parts.append("stock and update_step shard the model (FSDP2), hf_trainer copies it (DDP).")
        text = "\n\n".join(parts) + "\n"
        (self.settings.output_dir / "benchmark.md").write_text(text)
        raw = {
            "date": date,
            "command": command,
            "machine": machine,
            "versions": versions,
            "reference": self.reference,
            "product_flops_per_second": self.product_rate,
            "baselines": self.baselines,
            "missing": self.missing,
            "summaries": summaries,
            "losses": self.losses,
            "steps": self.steps,
        }
        raw_text = json.dumps(raw, indent=1, default=asdict)
        (self.settings.output_dir / "benchmark.json").write_text(raw_text + "\n")
        print(text)  # noqa: T201
        logger.info(f"Written to {self.settings.output_dir}: benchmark.md, benchmark.json")

    def _start(self, baseline: Baseline, round: int) -> Processes:
        """Starts the processes of a baseline; they wait for their first turn."""
        tokenizer = instantiate(OmegaConf.create(baseline.config["tokenizer"]))
        folder = self.settings.output_dir / "baselines" / baseline.name
        return Processes(
            baseline.name,
            write_spec(folder / "spec.json", baseline, tokenizer.pad_id),
            self.settings.nproc_per_node,
            folder / f"round_{round}_rank_{{rank}}.log",
            self.settings.step_timeout_seconds,
        )

    def _continue_without(self, name: str, error: BaselineDiedError) -> None:
        """Drops a failed baseline; raises the error if it is the reference."""
        if name == self.reference:
            raise error
        logger.warning(f"{error}\nThe benchmark continues without it.")
        self.missing[name] = "failed, see the log"
        self.steps = [step for step in self.steps if step.baseline != name]

    def _timed_step(
        self, number: int, step: int, name: str, seconds: float, reports: list[RankReport]
    ) -> report.TimedStep:
        contents = self.baselines[name].contents[step - 1]
        return report.TimedStep(
            round=number,
            step=step,
            baseline=name,
            seconds=seconds,
            num_target_tokens=contents.num_target_tokens,
            num_real_tokens=contents.num_real_tokens,
            num_positions=sum(each.num_positions for each in reports),
            fingerprint=sum(each.fingerprint for each in reports) + contents.fingerprint_of_shared,
            expected_fingerprint=contents.fingerprint,
            peak_memory_bytes=max(each.peak_memory_bytes for each in reports),
            num_flops=contents.num_flops,
        )


def _command() -> str:
    """Returns the command line, with registered configs by name."""
    names = {str(config_path(name)): name for configs in RECIPES.values() for name in configs}
    arguments = [names.get(argument, argument) for argument in ARGUMENTS]
    return shlex.join(["tune", "run", Path(sys.argv[0]).stem, *arguments])


@entry_point
def recipe_main(cfg: DictConfig) -> None:
    """Runs a benchmark config; ``key=value`` on the command line overrides its keys."""
    # Both end the processes of the baselines, too; during the imports Ctrl-C ended this one alone.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(1))
    logger.info(f"Benchmark of\n{OmegaConf.to_yaml(cfg)}")  # unresolved: overrides refer to the config that they change
    benchmark = BenchmarkTokensPerSecond(cfg)
    benchmark.write_start_adapters()
    for number in range(1, benchmark.settings.num_rounds + 1):
        benchmark.run_round(number)
    benchmark.write_report()


if __name__ == "__main__":
    sys.exit(recipe_main())
