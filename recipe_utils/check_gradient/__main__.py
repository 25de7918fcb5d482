"""Compares the gradient of a recipe's first update step with single samples.

    python -m recipe_utils.check_gradient full_finetune_update_step --config llama3_2/5M_full_update_step
    python -m recipe_utils.check_gradient --nproc_per_node 2 ./my_recipe.py --config my.yaml dtype=bf16

The recipe file's own ``setup`` and ``update`` compute the gradient in the layout, precision and
kernels of the config; :mod:`recipe_utils.check_gradient.plain` computes it one sample at a time in higher
precision, or :mod:`recipe_utils.check_gradient.own_sums` if the objective is not a stock one. Nothing is
trained, and output goes to a temporary folder.

The exit code is 0 if both are equal within the precision of the config's ``dtype``, 1 if not, and 2
for a wrong config.
"""

import gc
import os
import re
import sys
import tempfile
import zlib
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.distributed.run import main as launch
from torchtune import config
from torchtune.training.precision import PRECISION_STR_TO_DTYPE

from recipe_utils.check_gradient import cut_component, own_sums, plain
from recipe_utils.check_gradient.plain import Gradients, Precision, Step
from recipe_utils.check_gradient.recipe_file import parser_of, paths_of
from recipe_utils.checkpoint.tensors import parameters_by_name
from recipe_utils.cli.launcher import REPORTED_EXIT_CODE, wait_for_ranks
from recipe_utils.models.attention.packed_attention import attention_of
from recipe_utils.models.construct import build_on_meta
from recipe_utils.models.double_precision import DoublePrecision
from recipe_utils.models.pipeline.stages import adapters_of
from recipe_utils.models.weights import gather_weights
from recipe_utils.optim.nonfinite import NonfiniteError
from recipe_utils.optim.optimizer import single_optimizers
from recipe_utils.parallel.fsdp import local
from recipe_utils.parallel.process_group import world_size_from_env
from recipe_utils.parallel.ranks import resolve_device
from recipe_utils.settings.describe import load_recipe
from recipe_utils.settings.keys import keys_of
from recipe_utils.settings.problems import ConfigError, Problem, build
from recipe_utils.text.mixture import Mixture
from recipe_utils.training.entry_point import entry_point
from recipe_utils.update_steps.samples import SampleError

FACTOR = 3.0
"""Largest difference, in units of the rounding of single samples in the same precision. Both are
rounding errors of one computation in two orders, so their ratio is about 1."""
_COUNTED = ("pairs", "target_tokens")
"""Totals that are printed, and must not be 0."""
MOST_WEIGHTS = 1 << 27
"""Weights of models that stay whole: 1 GiB in fp64, and as much for gradients."""
_FOLDER = "TORCHTUNE_UPDATE_STEP_PROVE"
"""Environment variable with the temporary folder of all ranks."""
_UNUSED = (
    "metric_logger", "profiler", "resume_from_checkpoint", "resume_with_other_data", "resume_with_other_model",
    "run_val_every_n_steps", "dataset_val", "batch_size_val", "keep_best_checkpoint", "sample_prompts",
    "sample_every_n_steps", "sample_max_new_tokens", "enable_async_checkpointing", "lr_scheduler",
    "clip_grad_norm", "loraplus_lr_ratio", "reference_cache_dir",
)  # fmt: skip
"""Keys without influence on the gradient, except clipping, which would change it."""
_GROUPS = {
    "adapters": r"lora_|magnitude",
    "norms": r"norm|\.scale$",
    "attention": r"attn|attention",
    "MLP": r"mlp|feed_forward|expert|moe|router",
    "embeddings": r"embed|wte|wpe",
    "output": r"output|lm_head",
    "other": "",
}
"""Groups of parameters and what their names contain, the first that fits."""


def record(recipe_class: Any, cfg: DictConfig) -> Step:
    """Returns the first update step and its gradient as a recipe computes it. All ranks together."""
    recipe = recipe_class(cfg)
    with recipe.run:
        recipe.setup(cfg)
        model, ranks, loader = recipe.model, recipe.ranks, recipe.loader
        if (rate := plain.remove_dropout(model)) and ranks.is_zero:
            print(f"Dropout of {rate} is set to 0: a random gradient cannot be compared.")
        trained = parameters_by_name(model)
        if adapters_of(model).modules:
            perturb(trained)
        gather = partial(gather_weights, model, ranks.device, ranks.dp_rank == 0, ranks.cpu_group)
        weights = {name: weight.clone() for name, weight in gather().items()}
        with loader.epoch(0) as steps:
            step = next(iter(steps))
        if 0 in (step.totals.get(name) for name in _COUNTED):
            raise ConfigError("dataset: update step 1 has no targets; set a larger --num_samples")
        recipe.update(step)
        optimizers: list[Any] = single_optimizers(recipe.optimizer)
        if not all(each.has_stepped for each in optimizers):
            raise NonfiniteError("update step 1: its gradient is NaN or infinite")
        gradients = gather(only=trained)
        checked, mixture = loader.dataset.unread(), loader.dataset.parts
        dataset = checked.dataset
        items = []
        for index in loader.order.samples(0, 0).tolist():
            try:
                checked[index]
            except SampleError:  # skipped; training has raised any other
                continue
            items.append((mixture.dataset_of(index) if mixture else 0, dataset[index]))
        layout = [recipe.settings.microbatching]
        if recipe.settings.is_packed:
            whole = build_on_meta(partial(config.instantiate, cfg.model), recipe.settings)
            layout += [attention_of(whole, ranks.device).kernel]
        has_weights = hasattr(recipe, "by_sample") and recipe.by_sample.has_weights
        weighs = mixture.loss_weights if has_weights and isinstance(mixture, Mixture) else None
    return Step(cfg, items, weighs, weights, gradients, step.totals, layout)


@torch.no_grad()
def perturb(adapters: Mapping[str, Tensor]) -> None:
    """Adds noise to adapters, in place, the same to each copy of a shard: with B = 0, A has no gradient."""
    for name, adapter in adapters.items():
        own, generator = local(adapter), torch.Generator().manual_seed(zlib.crc32(name.encode()))
        own.add_(0.02 * torch.randn(own.shape, generator=generator).to(own))


# ---- Config of the comparison --------------------------------------------------------------------


def redirected(cfg: DictConfig, folder: Path) -> dict[str, Any]:
    """Returns a config, not resolved, whose output goes to ``folder``.

    Paths below ``output_dir`` that exist are read where they are.
    """
    old = str(cfg.output_dir)

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            own = {key: moved(each) for key, each in value.items()}
            return own | dict.fromkeys(own.keys() & {"output_dir"}, str(folder))
        if isinstance(value, list):
            return [moved(each) for each in value]
        start, slash, rest = str(value).partition("/")
        if start != "${output_dir}":
            start, slash, rest = str(value).partition(f"{old}/")
        if start not in ("", "${output_dir}") or not slash:
            return value
        return str(Path(old if Path(old, rest).exists() else folder, rest))

    raw: dict[str, Any] = moved(OmegaConf.to_container(cfg, resolve=False))
    return raw


def config_of(cfg: DictConfig, folder: Path, num_samples: int) -> DictConfig:
    """Returns the config of one update step whose output goes to ``folder``."""
    raw = redirected(cfg, folder)
    kept = {key: value for key, value in raw.items() if key not in _UNUSED}
    cfg = OmegaConf.create({**kept, "seed": kept.get("seed") or 0})
    cfg.optimizer._component_ = "recipe_utils.check_gradient.GradientRecorder"
    if cfg.get("reference") == "cached":
        cfg.epochs = cfg.max_steps_per_epoch = 1  # outputs of one update step
    ranks_per_row = (cfg.get("tensor_parallel_dim") or 1) * (cfg.get("pipeline_parallel_dim") or 1)
    per_pass = (cfg.get("batch_size") or 1) * max(world_size_from_env() // ranks_per_row, 1)
    steps = cfg.pop("gradient_accumulation_steps", None) or 1
    size = cfg.get("global_batch_size") or per_pass * steps
    cfg.global_batch_size = min(size, num_samples)
    return cfg


def objective_of(recipe: str, recipe_class: Any, keys: Collection[str], cfg: DictConfig, is_own: bool) -> Any:
    """Returns the function of :mod:`.plain` with a recipe's objective; None for the recipe's own ``sums``.

    Raises ConfigError for one that cannot be compared.
    """
    if "mask_ratio" in keys:
        raise ConfigError(f"recipe={recipe}: losses of images are not compared; give one of texts")
    loss, names = OmegaConf.select(cfg, "loss._component_", default=""), plain.CROSS_ENTROPIES
    is_stock, is_distillation = loss.rpartition(".")[2] in names, "kd_ratio" in keys
    if "prefix_sharing" in keys or is_distillation:  # sums need the outputs of a frozen model
        if is_own:
            raise ConfigError("--own_sums: not beside a teacher or reference; leave it out")
        if is_distillation and not is_stock:
            text = f"not compared beside a teacher; set it to one of {', '.join(names)}"
            raise ConfigError(Problem("loss", text, loss))
        return plain.losses_of_texts if is_distillation else plain.losses_of_pairs
    is_stock &= own_sums.names_of(recipe_class) == ("loss",)
    return None if is_own or not is_stock else plain.losses_of_texts


def refuse(cfg: DictConfig) -> None:
    """Raises ConfigError for weights whose gradient cannot be compared."""
    if cfg.get("quantizer") is not None:
        raise ConfigError("quantizer: fake-quantized weights are not compared; remove it")


def cut(cfg: DictConfig, folder: Path) -> str:
    """Cuts models that are too large for fp64 on a CPU to a few layers with random weights, in place.

    Returns a description, empty if the models stay whole. Raises ConfigError if they cannot be cut.
    """
    meta = torch.float32, torch.device("meta")
    keys = [key for key in ("model", "teacher_model") if cfg.get(key) is not None]
    try:
        wholes = {key: plain.build_plain(cfg[key], *meta) for key in keys}
    except Exception:  # any: the recipe reports it with all other problems
        return ""
    if hasattr(wholes["model"], "decoder"):
        raise ConfigError("model: samples with images are not compared; set it to a text model")
    num_weights = sum(p.numel() for whole in wholes.values() for p in whole.parameters())
    texts = []
    for key, whole in wholes.items() if num_weights > MOST_WEIGHTS else ():
        if not hasattr(whole, "layers"):
            text = f"{num_weights:,} weights, above {MOST_WEIGHTS:,}, and it cannot be cut; set a smaller model"
            raise ConfigError(f"{key}: {text}")
        cut_one = cut_component(OmegaConf.to_container(cfg[key], resolve=True), whole, folder / key)
        cfg[key], prefixes = cut_one, ("", "ref_") if key == "model" else ("teacher_",)
        num_layers = len(plain.build_plain(cfg[key], *meta).layers)
        texts.append(f"{key}: the first {num_layers} of {len(whole.layers)} layers, random weights\n")
        for name in (f"{prefix}checkpointer" for prefix in prefixes):
            if cfg.get(name) is not None:
                random = {"_component_": "recipe_utils.check_gradient.RandomWeights", "model": cut_one}
                cfg[name] = {**random, "seed": zlib.crc32(name.encode())}
    return "".join(texts)


# ---- Comparison ----------------------------------------------------------------------------------


def references(compute: Callable[..., Gradients], step: Step, is_cut: bool) -> tuple[Gradients, Gradients]:
    """Returns the gradient in higher precision, and that in the precision of the config.

    ``compute`` maps an update step and a :class:`.Precision` to gradients.
    """
    gc.collect()  # frees the recipe's model
    cfg, device = step.cfg, resolve_device(step.cfg.get("device"))
    keys = ("dtype", "weights_dtype", "teacher_dtype")
    own = Precision(device, *[cfg.get(key) or cfg.get("dtype") or "fp32" for key in keys])
    exact = Precision(torch.device("cpu"), *["fp64"] * 3)
    if is_cut:
        exact = Precision(device, *["fp32"] * 3)
    with nullcontext() if is_cut else DoublePrecision(only_casts=True):
        expected = compute(step, precision=exact)
    return expected, compute(step, precision=own)


def differences(found: Gradients, expected: Gradients) -> dict[str, float]:
    """Returns by group the norm of the difference over the norm of the expected gradient."""
    squares = {group: [0.0, 0.0] for group in _GROUPS}
    for name, gradient in expected.items():
        group = next(group for group, pattern in _GROUPS.items() if re.search(pattern, name))
        own, wide = found[name].double(), gradient.double()
        squares[group][0] += (own - wide).square().sum().item()
        squares[group][1] += wide.square().sum().item()
    pairs = {group: pair for group, pair in squares.items() if any(pair)}
    return {group: (error / norm if norm else inf) ** 0.5 for group, (error, norm) in pairs.items()}


def report(step: Step, exact: Gradients, rounded: Gradients, name: str, cuts: str) -> int:
    """Prints the comparison. Returns the exit code."""
    dtype, totals, world_size = step.cfg.get("dtype") or "fp32", step.totals, world_size_from_env()
    how = [] if "pairs" in totals else [f"{len(step.items)} samples"]
    how += [f"{n:,} {key.replace('_', ' ')}" for key, n in totals.items() if key in _COUNTED]
    how += [f"{world_size} rank{'s' * (world_size > 1)}", *step.layout, dtype]
    how += ["compiled"] * bool(step.cfg.get("compile"))
    print(f"{cuts}update step 1 of {name}: {', '.join(how)}")
    print(f"{'':14}difference   of which {dtype}'s rounding")
    # A reference in fp32 has the rounding of fp32 itself, and may be bitwise the single samples.
    floor = torch.finfo(PRECISION_STR_TO_DTYPE[dtype]).eps
    floor += 100 * torch.finfo(torch.float32).eps if cuts else 0
    roundings, wrong = differences(rounded, exact), []
    for group, difference in differences(step.gradients, exact).items():
        print(f"  {group:12}{difference:.1e}      {roundings.get(group, 0):.1e}")
        if not difference <= FACTOR * roundings.get(group, 0) + floor:
            wrong.append(group)
    if wrong:
        bound = f"{FACTOR:g} times the rounding of {dtype}"
        print(f"Not equal to single samples within {bound}: {', '.join(wrong)}.")
    else:
        print(f"Equal to single samples within the precision of {dtype}.")
    return int(bool(wrong))


def compare(recipe: str, cfg: DictConfig, folder: Path, name: str, num_samples: int, is_own: bool) -> int:
    """Compares the gradient of a recipe, whose objective ``is_own``. Returns the exit code, on all ranks."""
    settings, recipe_class = build("recipe", load_recipe, recipe)
    if recipe_class is None:
        raise ConfigError(f"recipe={recipe}: it needs one class with setup() and update()")
    objective = objective_of(recipe, recipe_class, keys_of(settings), cfg, is_own)
    refuse(cfg)
    compute = partial(plain.gradients_of, objective=objective)
    if objective is None:
        compute = partial(own_sums.gradients_of, recipe_class=recipe_class)
    cfg = config_of(cfg, folder, num_samples)
    cuts = cut(cfg, folder)
    step = record(recipe_class, cfg)
    rank, world_size, code = os.environ.get("RANK", "0"), world_size_from_env(), 1
    make_store: Any = dist.rendezvous("env://") if world_size > 1 else iter([(dist.HashStore(),)])  # type: ignore[attr-defined]
    store = next(make_store)[0]
    if rank != "0":
        store.set_timeout(timedelta(days=1))  # one process computes the reference
        code = int(store.get(_FOLDER))
        store.set(f"{_FOLDER}/{rank}", "")
    else:
        try:
            if objective is None:
                names = ", ".join(own_sums.names_of(recipe_class))
                print(f"Single samples are those of the recipe's own sums: {names}")
            code = report(step, *references(compute, step, bool(cuts)), name, cuts)
        finally:
            store.set(_FOLDER, str(code))
            # Without torchrun, the store ends with this process.
            store.wait([f"{_FOLDER}/{other}" for other in range(1, world_size)])
    return REPORTED_EXIT_CODE if code and world_size > 1 else code


def main() -> None:
    """Compares the recipe given on the command line."""
    parser = parser_of("python -m recipe_utils.check_gradient", __doc__)
    parser.add_argument("--nproc_per_node", type=int, default=1)
    parser.add_argument("--num_samples", type=int, default=64, help="most samples (default 64)")
    parser.add_argument("--own_sums", action="store_true", help="compare with the recipe's sums of single samples")
    given, overrides = parser.parse_known_args()
    recipe, path = paths_of(parser, given)
    with ExitStack() as stack:
        folder = os.environ.get(_FOLDER) or stack.enter_context(tempfile.TemporaryDirectory())
        if given.nproc_per_node > 1:
            os.environ[_FOLDER] = folder
            wait_for_ranks()
            options = ["--standalone", "--nproc_per_node", str(given.nproc_per_node), "-m"]
            own = [given.recipe, "--config", given.config, "--num_samples", str(given.num_samples)]
            own += ["--own_sums"] * given.own_sums
            launch([*options, "recipe_utils.check_gradient", *own, *overrides])
            return

        def prove(cfg: DictConfig) -> int:
            """Compares the gradient of a recipe with single samples."""
            name = given.config.removesuffix(".yaml")
            return compare(recipe, cfg, Path(folder), name, given.num_samples, given.own_sums)

        sys.argv = [recipe, "--config", path, *overrides]
        sys.exit(entry_point(prove)())


if __name__ == "__main__":
    main()
