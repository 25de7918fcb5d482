"""Compares the tokens per second of several ways to train the same update steps.

Every peer trains the same model from the same weights on the same samples in the same order: torchtune's
stock recipe, this project's recipe, Hugging Face's Trainer, and a bare loop that shows the limit. All
are alive at once, each in a process of its own; one at a time makes one optimizer step, in an order
that changes with every step. So whatever else the machine does meets all of them, and ratios are taken
step by step.

    tune run benchmark_tokens_per_second --config llama3_2/5M_benchmark
    tune run benchmark_tokens_per_second --config llama3_2/5M_benchmark overrides.batch_size=8

Peers are entries of the config; any key of theirs besides ``kind`` overrides the recipe's config:
``peers.in_order.gradient_accumulation_steps=2``, ``'~peers.stock'``. Leave the machine alone meanwhile.
"""

import contextlib
import difflib
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
from torchtune import config, utils
from tqdm import tqdm

from recipe_utils import settings as config_checks
from recipe_utils.benchmark import report
from recipe_utils.benchmark.exactness import crafted_config
from recipe_utils.benchmark.interleave import PeerDiedError, PeerProcesses, RankReport
from recipe_utils.benchmark.peer_configs import (
    Peer,
    load_base_config,
    merge,
    peer_of,
    update_step_keys,
)
from recipe_utils.benchmark.peers import (
    IGNORE_INDEX,
    KINDS,
    OWN_KEYS,
    samples_in_order,
    why_skipped,
)
from recipe_utils.benchmark.token_audit import StepContents, contents_of
from recipe_utils.benchmark.worker import write_spec
from recipe_utils.tune.registry import RECIPES, config_path

log = utils.get_logger("INFO")

CONFIG_KEYS = frozenset(
    """
    baseline exactness nproc_per_node num_rounds num_update_steps num_warmup_steps output_dir overrides
    peers step_timeout_seconds update_step_config
    """.split()  # noqa: SIM905
)
# Update steps beyond the measured ones: what prepares data ahead shall not run out of it, since its
# last steps would be timed without any such work.
SPARE_STEPS = 4
# For the last peer's threads to be stopped before the next one's time starts.
SETTLE_SECONDS = 0.02
PACKAGES = ("torch", "torchtune", "torchao", "transformers", "accelerate", "torchtune-update-step")


class BenchmarkTokensPerSecond:
    """Reads a config, runs its peers in turns and writes what it found.

    Args:
        cfg: the config.

    Raises:
        recipe_utils.settings.ConfigError: lists everything in the config that cannot work.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.output_dir = cfg.get("output_dir")
        self.num_ranks = cfg.get("nproc_per_node", 1)
        self.num_warmup_steps = cfg.get("num_warmup_steps", 1)
        self.num_update_steps = cfg.get("num_update_steps", 8)
        self.num_rounds = cfg.get("num_rounds", 3)
        self.exactness = cfg.get("exactness", True)
        self.step_timeout_seconds = cfg.get("step_timeout_seconds", 1800)
        self.num_steps = self.num_warmup_steps + self.num_update_steps
        self.missing: dict[str, str] = {}  # why a peer has no numbers
        self.peers: list[Peer] = []
        self.contents: dict[str, list[StepContents]] = {}  # what each update step should hold
        self._check_config(cfg)

        self.steps: list[report.TimedStep] = []
        self.losses: dict[str, list[list[float]]] = {peer.name: [] for peer in self.peers}
        self.errors: dict[str, Any] = {}

    # ---- Turns ----------------------------------------------------------------------------------

    def run_round(self, number: int) -> None:
        """Starts all peers anew, lets them take turns and ends them."""
        running: dict[str, PeerProcesses] = {}
        losses: dict[str, list[float]] = {}
        bar = tqdm(total=self.num_steps, desc=f"round {number}/{self.num_rounds}")
        try:
            for peer in self._living_peers():
                running[peer.name] = self._start(peer, "turns", peer.config, f"_{number}")
                losses[peer.name] = []
            for step in range(1, self.num_steps + 1):
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
                    if step > self.num_warmup_steps:
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
        """Compares each peer's gradients with those of one big batch; nothing is timed."""
        jobs = [(self.peers[0], "references")]
        jobs += [(peer, "gradient_errors") for peer in self._living_peers()]
        running: list[PeerProcesses] = []
        try:
            for peer, job in jobs:
                crafted = crafted_config(peer.config, self.num_ranks)
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
                    self.errors[peer.name] = messages[0]
        finally:
            for processes in running:
                processes.kill()
        for file in self._references.glob("*.pt"):
            file.unlink()

    # ---- Report ---------------------------------------------------------------------------------

    def write_report(self) -> None:
        """Prints the tables; writes benchmark.md, benchmark.json and benchmark.png."""
        folder = Path(self.output_dir)
        about = self._about()
        summaries = report.summarize(self.steps, self.losses, self.baseline)
        limit = next((peer.name for peer in self.peers if peer.kind == "limit"), None)
        batch = "{batch_size} x {gradient_accumulation_steps}".format(**self.peers[0].config)
        setting = (
            f"{about['machine']}, processes: {self.num_ranks}, {self.peers[0].config['dtype']}, batch "
            f"{batch}; rounds: {self.num_rounds}, timed update steps in each: {self.num_update_steps}"
        )
        no_chart = report.write_chart(
            folder / "benchmark.png", summaries, self.baseline, limit, setting
        )
        rounds = "A ratio is taken over the baseline in the same round and update step."
        parts = [
            f"# Target tokens per second\n\n{setting}. {about['date']}, "
            + ", ".join(f"{name} {number}" for name, number in about["versions"].items() if number)
            + f".\n\n```bash\n{about['command']}\n```",
            report.throughput_table(summaries, self.baseline, self.missing),
            f"{rounds} {report.samples_sentence(self.steps, summaries)} "
            f"{report.idle_sentence(self.steps, len(self.peers))}",
        ]
        if self.num_ranks > 1:
            parts.append(
                "stock and update_step shard the model (FSDP2), hf_trainer copies it (DDP)."
            )
        if self.errors:
            parts += [
                "## Gradient error\n\nmax|g - reference| / max|reference|, where the reference is the "
                "gradient of the update step as one batch, in float64.",
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

    def _check_config(self, cfg: DictConfig) -> None:
        """Raises everything that is wrong with the config at once; settles the peers."""
        problems = config_checks.Problems()
        config_checks.check_keys(
            problems, OmegaConf.to_container(cfg, resolve=False), CONFIG_KEYS, ()
        )
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            problems.add(
                f"--nproc_per_node {os.environ['WORLD_SIZE']}: the benchmark starts its peers' processes "
                f"itself; set nproc_per_node={os.environ['WORLD_SIZE']} as a key instead"
            )
        problems.check_at_least(
            1,
            nproc_per_node=self.num_ranks,
            num_warmup_steps=self.num_warmup_steps,
            num_update_steps=self.num_update_steps,
            num_rounds=self.num_rounds,
            step_timeout_seconds=self.step_timeout_seconds,
        )
        with problems.collect():
            config_checks.check_writable_dir("output_dir", self.output_dir)
        base = None
        with problems.collect():
            base = load_base_config(str(cfg.get("update_step_config")))
            base = merge(base, OmegaConf.to_container(cfg.get("overrides") or DictConfig({})))
            self._check_base(problems, base)
        settings = OmegaConf.to_container(cfg.get("peers") or DictConfig({}))
        assert isinstance(settings, dict)
        if not settings:
            problems.add("peers: there are none; set it to names with a kind each, see the config")
        self.baseline = cfg.get("baseline") or next(iter(settings), "")
        if settings and self.baseline not in settings:
            problems.add(
                f"baseline={self.baseline}: no peer has this name; set it to one of "
                f"{', '.join(settings)}"
            )
        for name, of_peer in settings.items():
            if base is not None:
                self._check_peer(problems, name, of_peer, base)
        problems.raise_if_any()

    def _check_base(self, problems: config_checks.Problems, base: DictConfig) -> None:
        config_checks.check_keys(
            problems, OmegaConf.to_container(base, resolve=False), update_step_keys(),
            ("model", "tokenizer", "dataset", "optimizer", "checkpointer"),
        )  # fmt: skip
        if base.get("optimizer_in_bwd", False):
            problems.add(
                "overrides.optimizer_in_bwd=True: it steps in every backward, so update steps could not "
                "be told apart; set it to False"
            )
        if base.get("tensor_parallel_dim", 1) != 1:
            problems.add(
                f"overrides.tensor_parallel_dim={base.tensor_parallel_dim}: the benchmark compares "
                "data-parallel processes only; set it to 1"
            )

    def _check_peer(
        self, problems: config_checks.Problems, name: str, settings: Any, base: DictConfig
    ) -> None:
        kind = settings.get("kind") if isinstance(settings, dict) else None
        if kind not in KINDS:
            problems.add(f"peers.{name}.kind={kind}: set it to one of {', '.join(KINDS)}")
            return
        known = {"kind", *update_step_keys(), *OWN_KEYS.get(kind, ())}
        for key in sorted(settings.keys() - known - set(base)):
            similar = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {similar[0]}?" if similar else "take it out"
            problems.add(f"peers.{name}.{key}={settings[key]}: kind={kind} has no such key; {hint}")
        dataset = merge(base, {k: v for k, v in settings.items() if k != "kind"}).get("dataset")
        is_packed = isinstance(dataset, DictConfig) and dataset.get("packed", False)
        reason = why_skipped(kind, self.num_ranks, is_packed)
        if reason is not None and name == self.baseline:
            problems.add(f"baseline={name}: it {reason}; set it to another peer")
        elif reason is not None:
            self.missing[name] = f"skipped: {reason}"
            return
        with problems.collect(f"peers.{name}: "):
            peer = peer_of(
                name, settings, base, self.output_dir, self.num_ranks, self.num_steps + SPARE_STEPS
            )
            self.peers.append(peer)
            self.contents[name] = self._contents_of(peer)

    def _contents_of(self, peer: Peer) -> list[StepContents]:
        """What each measured update step of the peer should hold.

        Raises:
            ValueError: the dataset is too small.
        """
        cfg = OmegaConf.create(peer.config)
        for other in self.peers:
            data = ("dataset", "tokenizer", "shuffle", "batch_size", "gradient_accumulation_steps")
            if other.name in self.contents and all(peer.config[k] == other.config[k] for k in data):
                return self.contents[other.name]
        tokenizer = config.instantiate(cfg.tokenizer)
        samples = samples_in_order(cfg, tokenizer, self.num_ranks)
        per_step = cfg.batch_size * cfg.gradient_accumulation_steps * self.num_ranks
        if len(samples) < self.num_steps * per_step:
            raise ValueError(
                f"num_update_steps={self.num_update_steps}: the dataset's {len(samples)} samples hold "
                f"{len(samples) // per_step} update steps of {per_step}, {self.num_warmup_steps} of them "
                "warm-up; set it lower"
            )
        return [
            contents_of(
                samples[step * per_step : (step + 1) * per_step], tokenizer.pad_id, IGNORE_INDEX
            )
            for step in range(self.num_steps)
        ]

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
        folder = Path(self.output_dir, "peers", peer.name)
        return PeerProcesses(
            peer.name,
            write_spec(
                folder / f"{job}.json", job, peer, peer_config, tokenizer.pad_id, self._references
            ),
            num_ranks or self.num_ranks,
            folder / f"{job}{suffix}_rank_{{rank}}.log",
            self.step_timeout_seconds,
        )

    @property
    def _references(self) -> Path:
        return Path(self.output_dir, "references")

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
            fingerprint=sum(each.fingerprint for each in reports),
            expected_fingerprint=contents.fingerprint,
            peak_memory_bytes=max(each.peak_memory_bytes for each in reports),
            idle_cpu_seconds=sum(each.idle_cpu_seconds for each in reports),
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


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    """Entry point: the config's keys, overridden by ``key=value`` on the command line."""
    # A killed benchmark ends its peers, as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    config.log_config(recipe_name="BenchmarkTokensPerSecond", cfg=cfg)
    benchmark = BenchmarkTokensPerSecond(cfg)
    for number in range(1, benchmark.num_rounds + 1):
        benchmark.run_round(number)
    if benchmark.exactness:
        benchmark.measure_exactness()
    benchmark.write_report()


if __name__ == "__main__":
    sys.exit(recipe_main())
