"""Compares the tokens per second of several ways to train the same update steps.

Every peer trains the same model from the same weights on the same samples in the same order: torchtune's
stock recipe, this project's recipe, Hugging Face's trainers, and a bare loop that shows the limit. All
are alive at once, each in a process of its own; one at a time makes one optimizer step, in an order
that changes with every step. So whatever else the machine does meets all of them, and ratios are taken
step by step.

    tune run benchmark_tokens_per_second --config llama3_2/5M_benchmark
    tune run benchmark_tokens_per_second --config llama3_2/5M_benchmark overrides.batch_size=8
    tune run benchmark_tokens_per_second --config llama3_2/5M_lora_benchmark
    tune run benchmark_tokens_per_second --config llama3_2/5M_dpo_benchmark
    tune run benchmark_tokens_per_second --config llama3_2/5M_to_1M_KD_benchmark

Peers are entries of the config; any key of theirs besides ``kind`` overrides the recipe's config:
``peers.in_order.gradient_accumulation_steps=2``, ``'~peers.stock'``. Leave the machine alone meanwhile.
All keys: ``python -m recipe_utils.settings benchmark_tokens_per_second``.
"""

import contextlib
import os
import platform
import shlex
import signal
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from pydantic.dataclasses import dataclass
from torchtune import config, utils
from tqdm import tqdm

from recipe_utils.benchmark import report
from recipe_utils.benchmark.exactness import CRAFTED, crafted_config
from recipe_utils.benchmark.interleave import PeerDiedError, PeerProcesses, RankReport
from recipe_utils.benchmark.lineup import LineupSettings
from recipe_utils.benchmark.matrix_peak import peak_of, useful_flops
from recipe_utils.benchmark.peer_configs import Peer
from recipe_utils.benchmark.peers import DISTILLATION, PAIRS
from recipe_utils.benchmark.start_adapters import write_fresh_adapters
from recipe_utils.benchmark.worker import write_spec
from recipe_utils.run.entry_point import entry_point
from recipe_utils.settings.keys import STRICT, Count, Positive
from recipe_utils.settings.read import read_settings
from recipe_utils.tune.registry import RECIPES, config_path

log = utils.get_logger("INFO")

# For the last peer's threads to be stopped before the next one's time starts.
SETTLE_SECONDS = 0.02
PACKAGES = (
    "torch", "torchtune", "torchao", "transformers", "accelerate", "peft", "trl", "torchtune-update-step",
)  # fmt: skip


@dataclass(frozen=True, config=STRICT)
class Settings:
    """The config's keys. The YAML is flat."""

    compared: LineupSettings  # peers, baseline, num_update_steps, nproc_per_node, ...

    num_rounds: Count = 3
    """Every round starts all peers anew."""
    exactness: bool = True
    """Also compares gradients with those of one big batch."""
    step_timeout_seconds: Positive = 1800
    """How long a peer may be silent in its turn."""


class BenchmarkTokensPerSecond:
    """Reads a config, runs its peers in turns and writes what it found.

    Args:
        cfg: the config.

    Raises:
        recipe_utils.settings.problems.ConfigError: lists everything in the config that cannot work.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.settings = read_settings(cfg, Settings)
        self.compared = self.settings.compared
        self.num_ranks = self.compared.nproc_per_node
        self.output_dir = Path(self.compared.output_dir)
        self.baseline = self.compared.baseline_name
        lineup = self.compared.lineup
        self.peers = lineup.peers
        self.contents = lineup.contents  # what each update step should hold
        self.missing = dict(lineup.skipped)  # why a peer has no numbers
        (self.baseline_peer,) = [peer for peer in self.peers if peer.name == self.baseline]
        self.other_models = [
            peer.name
            for peer in self.peers
            if peer.config["model"] != self.baseline_peer.config["model"]
        ]

        self.steps: list[report.TimedStep] = []
        self.losses: dict[str, list[list[float]]] = {peer.name: [] for peer in self.peers}
        self.errors: dict[str, Any] = {}
        self.useful_flops = {
            peer.name: useful_flops(peer, self.contents[peer.name]) for peer in self.peers
        }
        self.peak_tflops: float | None = None  # of matrix products

    # ---- Turns ----------------------------------------------------------------------------------

    def write_start_adapters(self) -> None:
        """Draws the adapters that peers start from, once for those of the same model."""
        drawing = [peer.config for peer in self.peers if peer.draws_adapters]
        files = {each["checkpointer"]["adapter_checkpoint"]: each for each in drawing}
        for of_peer in files.values():
            write_fresh_adapters(OmegaConf.create(of_peer))

    def measure_matrix_peak(self) -> None:
        """Times matrix products while no peer is there; of several rounds the fastest counts."""
        if self.useful_flops[self.baseline][0] is None:
            return
        processes = self._start(self.baseline_peer, "products", self.baseline_peer.config)
        try:
            _, messages = processes.take_turn()
        except PeerDiedError as error:
            log.warning(str(error))
        else:
            self.peak_tflops = max(self.peak_tflops or 0, peak_of(messages))
        finally:
            processes.kill()

    def run_round(self, number: int) -> None:
        """Starts all peers anew, lets them take turns and ends them."""
        running: dict[str, PeerProcesses] = {}
        losses: dict[str, list[float]] = {}
        num_steps = self.compared.num_steps
        bar = tqdm(total=num_steps, desc=f"round {number}/{self.settings.num_rounds}")
        try:
            for peer in self._living_peers():
                running[peer.name] = self._start(peer, "turns", peer.config, f"_{number}")
                losses[peer.name] = []
            for step in range(1, num_steps + 1):
                names = list(running)
                first = step % len(names)
                for name in names[first:] + names[:first]:
                    time.sleep(SETTLE_SECONDS)
                    try:
                        seconds, reports = running[name].take_turn()
                    except PeerDiedError as error:
                        self._go_on_without(name, error)
                        running.pop(name).kill()
                        continue
                    losses[name] += reports[0].losses
                    if step > self.compared.num_warmup_steps:
                        self.steps.append(self._timed_step(number, step, name, seconds, reports))
                bar.update(1)
            for name, processes in running.items():
                try:
                    losses[name] += processes.finish()
                except PeerDiedError as error:
                    self._go_on_without(name, error)
        finally:
            bar.close()
            for processes in running.values():
                processes.kill()
        for name, of_round in losses.items():
            self.losses[name].append(of_round)

    def measure_exactness(self) -> None:
        """Compares each peer's gradients with those of one big batch; nothing is timed.

        Those of another model than the baseline's have no reference.
        """
        living = self._living_peers()
        dataset = CRAFTED[self.baseline_peer.recipe]
        jobs = [(self.baseline_peer, "references")]
        jobs += [(peer, "gradient_errors") for peer in living if peer.name not in self.other_models]
        errors: dict[str, Any] = {peer.name: "another model" for peer in living}
        running: list[PeerProcesses] = []
        try:
            for peer, job in jobs:
                crafted = crafted_config(peer.config, self.num_ranks, self._references, dataset)
                num_ranks = 1 if job == "references" else self.num_ranks
                running.append(self._start(peer, job, crafted, num_ranks=num_ranks))
            for (peer, job), processes in zip(tqdm(jobs, desc="gradients"), running, strict=True):
                try:
                    _, messages = processes.take_turn()
                except PeerDiedError as error:
                    log.warning(str(error))
                    if job == "references":  # what was timed is worth a report all the same
                        return
                    messages = ["failed, see the log"]
                processes.kill()
                if job == "gradient_errors":
                    errors[peer.name] = messages[0]
        finally:
            for processes in running:
                processes.kill()
        self.errors = errors
        for file in self._references.glob("*.pt"):
            file.unlink()

    # ---- Report ---------------------------------------------------------------------------------

    def write_report(self) -> None:
        """Prints the tables; writes benchmark.md, benchmark.json and benchmark.png."""
        folder = self.output_dir
        about = self._about()
        is_distillation = self.baseline_peer.recipe == DISTILLATION
        losses = self.losses
        if is_distillation:
            losses = {name: [each[:1] for each in rounds] for name, rounds in losses.items()}
        summaries = report.summarize(
            self.steps, losses, self.baseline, self.other_models, self.peak_tflops
        )
        limit = next((peer.name for peer in self.peers if peer.kind == "limit"), None)
        batch = "{batch_size} x {gradient_accumulation_steps}".format(**self.peers[0].config)
        setting = (
            f"{about['machine']}, processes: {self.num_ranks}, {self.peers[0].config['dtype']}, batch "
            f"{batch}; rounds: {self.settings.num_rounds}, timed update steps in each: "
            f"{self.compared.num_update_steps}"
        )
        no_chart = report.write_chart(
            folder / "benchmark.png", summaries, self.baseline, limit, setting
        )
        is_of_pairs = self.baseline_peer.recipe == PAIRS
        rounds = "A ratio is taken over the baseline in the same round and update step."
        parts = [
            f"# Target tokens per second\n\n{setting}. {about['date']}, "
            + ", ".join(f"{name} {number}" for name, number in about["versions"].items() if number)
            + f".\n\n```bash\n{about['command']}\n```",
            report.throughput_table(summaries, self.baseline, self.missing),
            f"{rounds} {report.samples_sentence(self.steps, summaries)} "
            f"{report.idle_sentence(self.steps, len(self.peers))}",
            *filter(None, [report.peak_sentence(self.peak_tflops)]),
        ]
        if is_of_pairs:
            parts.append(
                "Targets are those of both answers. Real tokens are those that go into the trained model: what "
                "both sides of a pair begin with once where it is shared."
            )
        if is_distillation:
            parts.append(
                "The loss deviation is that of the first update step: stock divides the mean of each microbatch by "
                "the number of tokens of the update step, so that its weights are others from then on. Losses hold "
                "the teacher's entropy, as stock's do, but for those of kind trl."
            )
        if self.num_ranks > 1:
            parts.append(
                "stock and update_step shard the model (FSDP2), hf_trainer and trl copy it (DDP)."
            )
        if self.errors:
            parts += [
                "## Gradient error\n\nmax|g - reference| / max|reference|, where the reference is the "
                f"gradient of the update step {'pair by pair' if is_of_pairs else 'as one batch'}, in float64.",
                report.exactness_table(self.errors),
            ]
        parts += ["## Losses of round 1", report.loss_table(self.losses)]
        if no_chart is None:
            parts.append("![Target tokens per second](benchmark.png)")
        text = "\n\n".join(parts) + "\n"
        (folder / "benchmark.md").write_text(text)
        report.write_json(
            folder / "benchmark.json",
            {
                **about,
                "baseline": self.baseline,
                "matrix_peak_tflops": self.peak_tflops,
                "peers": {
                    peer.name: {
                        "kind": peer.kind,
                        "overrides": peer.overrides,
                        "config": peer.config,
                        "update_steps": [step._asdict() for step in self.contents[peer.name]],
                    }
                    for peer in self.peers
                },
                "missing": self.missing,
                "summaries": summaries,
                "losses": self.losses,
                "gradient_errors": self.errors,
            },
            self.steps,
        )
        print(text)  # noqa: T201
        log.info(
            f"Written to {folder}: benchmark.md, benchmark.json"
            + (", benchmark.png" if no_chart is None else f"; no chart, because {no_chart}")
        )

    # ---- Parts of the above ---------------------------------------------------------------------

    def _start(
        self,
        peer: Peer,
        job: str,
        peer_config: dict[str, Any],
        suffix: str = "",
        num_ranks: int | None = None,
    ) -> PeerProcesses:
        """Starts a peer's processes, which wait for their first turn."""
        tokenizer = config.instantiate(OmegaConf.create(peer.config["tokenizer"]))
        folder = self.output_dir / "peers" / peer.name
        return PeerProcesses(
            peer.name,
            write_spec(
                folder / f"{job}.json", job, peer, peer_config, tokenizer.pad_id, self._references
            ),
            num_ranks or self.num_ranks,
            folder / f"{job}{suffix}_rank_{{rank}}.log",
            self.settings.step_timeout_seconds,
        )

    @property
    def _references(self) -> Path:
        return self.output_dir / "references"

    def _living_peers(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.name not in self.missing]

    def _go_on_without(self, name: str, error: PeerDiedError) -> None:
        """Takes a peer out that failed.

        Raises:
            PeerDiedError: it is the baseline.
        """
        if name == self.baseline:
            raise error
        log.warning(f"{error}\nThe benchmark goes on without it.")
        self.missing[name] = "failed, see the log"
        self.steps = [step for step in self.steps if step.peer != name]

    def _timed_step(
        self, number: int, step: int, name: str, seconds: float, reports: list[RankReport]
    ) -> report.TimedStep:
        contents = self.contents[name][step - 1]
        return report.TimedStep(
            round=number,
            step=step,
            peer=name,
            seconds=seconds,
            num_target_tokens=contents.num_target_tokens,
            num_real_tokens=contents.num_real_tokens,
            num_slots=sum(each.num_slots for each in reports),
            fingerprint=sum(each.fingerprint for each in reports) + contents.fingerprint_of_shared,
            expected_fingerprint=contents.fingerprint,
            peak_memory_bytes=max(each.peak_memory_bytes for each in reports),
            idle_cpu_seconds=sum(each.idle_cpu_seconds for each in reports),
            useful_flops=self.useful_flops[name][step - 1],
        )

    def _about(self) -> dict[str, Any]:
        """When, where and with what this ran."""
        device = torch.device(self.peers[0].config["device"])
        on_cuda = device.type == "cuda" and torch.cuda.is_available()
        return {
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "command": _command(),
            "machine": torch.cuda.get_device_name() if on_cuda else _cpu_name(),
            "versions": {name: _version(name) for name in ("python", *PACKAGES)},
        }


def _command() -> str:
    """How this was started, with a registered config by its name instead of its path."""
    names = {str(config_path(name)): name for configs in RECIPES.values() for name in configs}
    arguments = [names.get(argument, argument) for argument in sys.argv[1:]]
    return shlex.join(["tune", "run", Path(sys.argv[0]).stem, *arguments])


def _cpu_name() -> str:
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return f"{os.cpu_count()} x {name}"


def _version(package: str) -> str | None:
    if package == "python":
        return platform.python_version()
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@entry_point
def recipe_main(cfg: DictConfig) -> None:
    """Entry point: the config's keys, overridden by ``key=value`` on the command line."""
    # A killed benchmark ends its peers, as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    config.log_config(recipe_name="BenchmarkTokensPerSecond", cfg=cfg)
    benchmark = BenchmarkTokensPerSecond(cfg)
    benchmark.write_start_adapters()
    for number in range(1, benchmark.settings.num_rounds + 1):
        benchmark.measure_matrix_peak()
        benchmark.run_round(number)
    if benchmark.settings.exactness:
        benchmark.measure_exactness()
    benchmark.write_report()


if __name__ == "__main__":
    sys.exit(recipe_main())
