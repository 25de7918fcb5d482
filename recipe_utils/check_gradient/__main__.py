"""Compares the gradient of a recipe's update step 2 with single samples.

    python -m recipe_utils.check_gradient full_finetune_update_step --config llama3_2/5M_full_update_step
    python -m recipe_utils.check_gradient --nproc_per_node 2 ./my_recipe.py --config my.yaml dtype=bf16

The recipe file's own ``setup`` and ``update`` compute it in the layout, precision and kernels of the config, and
once more for single samples: :mod:`recipe_utils.check_gradient.single_samples`. Output goes to a temporary folder.

The exit code is 0 if both are equal within the precision of the config's ``dtype``, 1 if not, and 2
for a wrong config.
"""

import os
import re
import signal
import sys
import tempfile
import zlib
from argparse import Namespace
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch.distributed.run import main as launch

from recipe_utils.check_gradient import on_meta
from recipe_utils.check_gradient.recipe_file import parser_of, paths_of
from recipe_utils.check_gradient.single_samples import Recorded, SingleSamples, Weights, gathered
from recipe_utils.cli.exit_codes import REPORTED_EXIT_CODE
from recipe_utils.cli.launcher import wait_for_ranks
from recipe_utils.models.adapters.nf4 import is_quantized
from recipe_utils.models.attention.packed_attention import attention_of
from recipe_utils.models.construct import build_on_meta
from recipe_utils.models.pipeline.stages import local_stages
from recipe_utils.models.transformers.double_precision import DoublePrecision
from recipe_utils.models.transformers.interface import DecoderOfTransformers
from recipe_utils.optim.nonfinite import NonfiniteError
from recipe_utils.optim.optimizer import single_optimizers
from recipe_utils.parallel.process_group import world_size_from_env
from recipe_utils.parallel.ranks import resolve_device
from recipe_utils.settings.describe import load_recipe
from recipe_utils.settings.keys import keys_of
from recipe_utils.settings.problems import ConfigError, build
from recipe_utils.settings.read import read_settings
from recipe_utils.torchtune_names import DTYPES, instantiate
from recipe_utils.training.command import entry_point
from recipe_utils.update_steps.step import UpdateStep

FACTOR = 3.0
"""Largest difference, in units of the rounding of single samples in the same precision. Both are
rounding errors of one computation in two orders, so their ratio is about 1."""
_TOTALS = ("pairs", "target_tokens")
"""Totals that are printed, and must not be 0."""
MOST_WEIGHTS = 1 << 27
"""Weights of models that stay whole: 1 GiB in fp64, and as much for gradients."""
_FOLDER = "TORCHTUNE_UPDATE_STEP_PROVE"
"""Environment variable with the temporary folder of all ranks."""
_UNUSED = re.compile(
    "metric_logger|profiler|resume_.*|run_val_.*|dataset_val|batch_size_val|keep_best_.*|early_stopping_.*|sample_.*|enable_async_.*|"
    "lr_scheduler|clip_grad_norm|loraplus_lr_ratio|reference_cache_dir"
)
"""Keys without influence on the gradient, except clipping, which would change it."""
_OF_LAYOUTS = re.compile(
    "device|data_parallel_.*|tensor_parallel_.*|(teacher_)?pipeline_parallel_.*|gradient_sync|process_group_.*|"
    "(teacher_)?fsdp.*|(teacher_)?custom_sharded_layers|compile|optimizer_in_bwd|max_tokens_per_microbatch|"
    "max_ranks_per_row|balance_over_ranks|packed_attention|enable_activation_.*|ac_mode|ac_option|reference|prefix_sharing"
)
"""Keys of layouts and rows, which one process with a sample per microbatch does not have."""
_GROUPS = {
    "adapters": "lora_|magnitude", "norms": r"norm|\.scale$", "attention": "attn|attention",
    "MLP": "mlp|feed_forward|expert|moe|router", "embeddings": "embed|wte|wpe", "output": "output|lm_head", "other": "",
}  # fmt: skip
"""Groups of parameters and what their names contain, the first that fits."""


def record(recipe_class: Any, cfg: DictConfig, name: str) -> Recorded:
    """Returns an update step after update step 1, and its gradient as a recipe computes it. All ranks together.

    At the start, a divergence from it has no gradient.
    """
    recipe = recipe_class(cfg)
    with recipe.run:
        recipe.setup(cfg)
        model, ranks, loader, settings = recipe.model.module, recipe.ranks, recipe.loader, recipe.settings
        model.eval()  # without dropout
        optimizers: list[Any] = single_optimizers(recipe.stepper.optimizer)

        def update(step: UpdateStep, number: int) -> None:
            if 0 in (step.totals.get(name) for name in _TOTALS):
                raise ConfigError(f"dataset: update step {step.index + 1} has no targets; set a larger --num_samples")
            recipe.update(step)
            if any(each.num_steps < number for each in optimizers):
                raise NonfiniteError(f"update step {number}: its gradient is NaN or infinite")

        with loader.epoch(0) as steps:
            first, *more = islice(steps, 2)
        start = gathered(model, ranks)
        update(first, 1)
        moved = gathered(model, ranks)
        for each in optimizers:
            each.records = True
        # The last one of an epoch may be small, or the only one.
        step = more[0] if more and not more[0].is_last_of_epoch else first
        update(step, 2)
        if ranks.is_zero:
            samples = f"{len(loader.order.samples(0, step.index)) - int(step.totals['skipped_samples'])} samples"
            how = [] if "pairs" in step.totals else [samples]
            how += [f"{step.totals[key]:,} {key.replace('_', ' ')}" for key in _TOTALS if key in step.totals]
            how += [f"{world_size_from_env()} rank{'s' * (world_size_from_env() > 1)}", settings.data.microbatching]
            if settings.data.is_packed:
                whole = build_on_meta(partial(instantiate, cfg.model), settings.model)
                how += [attention_of(whole, ranks.device, settings.model.packed_attention).kernel]
            how += [cfg.get("dtype") or "fp32", *["compiled"] * bool(cfg.get("compile"))]
            print(f"update step {step.index + 1} of {name}, after one: {', '.join(how)}")
        states = (stage.state_dict(keep_vars=True) for stage in local_stages(model))
        names = {name for state in states for name, weight in state.items() if weight.requires_grad}
        gradients = gathered(model, ranks, names)
    return Recorded(start, moved, gradients, step)


def config_of(cfg: DictConfig, settings_class: type, folder: Path, num_samples: int) -> DictConfig:
    """Returns the config of update steps whose output goes to ``folder``.

    Paths below ``output_dir`` that exist are read where they are.
    """
    old = f"{cfg.output_dir}/"

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: str(folder) if key == "output_dir" else moved(each) for key, each in value.items()}
        if isinstance(value, list):
            return [moved(each) for each in value]
        path = str(value).replace("${output_dir}/", old)
        if not path.startswith(old):
            return value
        return path if Path(path).exists() else str(folder / path.removeprefix(old))

    raw = moved(OmegaConf.to_container(cfg, resolve=False))  # keys that only others interpolate stay read
    cfg = OmegaConf.create({key: value for key, value in raw.items() if not _UNUSED.fullmatch(key)})
    cfg.seed = cfg.get("seed") or 0
    cfg.optimizer._component_ = "recipe_utils.check_gradient.GradientRecorder"
    if cfg.get("reference") == "cached":
        cfg.epochs, cfg.max_steps_per_epoch = 1, 3  # outputs of few update steps
    settings: Any = read_settings(cfg, settings_class)
    cfg.gradient_accumulation_steps = None
    dp_degree = settings.ranks.dims.dp_degree
    cfg.global_batch_size = min(settings.data.samples_per_update_step(dp_degree), num_samples)
    return cfg


def single_config_of(cfg: DictConfig, **changes: str) -> DictConfig:
    """Returns the config of one process and one sample per microbatch; with a ``dtype``, everything is in it."""
    kept: dict[Any, Any] = {key: value for key, value in cfg.items() if not _OF_LAYOUTS.fullmatch(str(key))}
    if "dtype" in changes:
        kept |= dict.fromkeys(kept.keys() & {"weights_dtype", "teacher_dtype"})
    single = OmegaConf.create({**kept, "microbatching": "in_order", "batch_size": 1, **changes})
    if any(map(is_quantized, on_meta(cfg.model).modules())):
        single.model.quantize_base = False  # its weights are those that the layout has upcast
    return single


def cut(cfg: DictConfig, folder: Path) -> bool:
    """Cuts models that are too large for fp64 on a CPU to a few layers with random weights, in place.

    Returns True if it has cut any. Raises ConfigError if they cannot be cut.
    """
    wholes = {}
    with suppress(Exception):  # any: the recipe reports it with all other problems
        wholes = {key: on_meta(cfg[key]) for key in ("model", "teacher_model") if cfg.get(key) is not None}
    num_weights = sum(p.numel() for whole in wholes.values() for p in whole.parameters())
    if num_weights <= MOST_WEIGHTS:
        return False
    for key, whole in wholes.items():
        if not hasattr(whole, "layers"):
            text = f"{num_weights:,} weights, above {MOST_WEIGHTS:,}, and it cannot be cut; set a smaller model"
            raise ConfigError(f"{key}: {text}")
        component: Any = OmegaConf.to_container(cfg[key], resolve=True)
        if isinstance(whole, DecoderOfTransformers):
            from recipe_utils.models.transformers.packing_check import with_few_layers

            with_few_layers(whole.model.config).save_pretrained(folder / key)
            cut_one = {k: v for k, v in component.items() if k != "config"} | {"path": str(folder / key)}
        else:
            cut_one = {"_component_": "recipe_utils.check_gradient.first_layers", "model": component, "num_layers": 2}
        cfg[key], prefixes = cut_one, ("", "ref_") if key == "model" else ("teacher_",)
        if os.environ.get("RANK", "0") == "0":
            print(f"{key}: the first {len(on_meta(cfg[key]).layers)} of {len(whole.layers)} layers, random weights")
        for name in (f"{prefix}checkpointer" for prefix in prefixes):
            if cfg.get(name) is not None:
                random = {"_component_": "recipe_utils.check_gradient.RandomWeights", "model": cut_one}
                cfg[name] = {**random, "seed": zlib.crc32(name.encode())}
    return True


def differences(found: Weights, expected: Weights) -> dict[str, float]:
    """Returns by group the norm of the difference over the norm of the expected gradient."""
    squares = {group: torch.zeros(2, dtype=torch.float64) for group in _GROUPS}
    for name, gradient in expected.items():
        group = next(group for group, pattern in _GROUPS.items() if re.search(pattern, name))
        pair = found[name].double() - gradient.double(), gradient.double()
        squares[group] += torch.stack([each.square().sum() for each in pair])
    pairs = {group: pair.tolist() for group, pair in squares.items() if pair.any()}
    return {group: (error / norm if norm else inf) ** 0.5 for group, (error, norm) in pairs.items()}


def report(recorded: Recorded, exact: SingleSamples, rounded: Weights, dtype: str, is_cut: bool) -> int:
    """Prints the comparison. Returns the exit code."""
    print(f"{'':14}difference   of which {dtype}'s rounding")
    # A reference in fp32 has the rounding of fp32 itself, and may be bitwise the single samples.
    floor = torch.finfo(DTYPES[dtype]).eps + 100 * torch.finfo(torch.float32).eps * is_cut
    roundings, groups = differences(rounded, exact.gradients), []
    for group, difference in differences(recorded.gradients, exact.gradients).items():
        print(f"  {group:12}{difference:.1e}      {roundings.get(group, 0):.1e}")
        groups += [group] * (not difference <= FACTOR * roundings.get(group, 0) + floor)
    not_judged = ["the loss of one sample, since both sides call the same loss; dropout", *exact.not_judged]
    print(*(f"Not judged: {text}." for text in not_judged), *(f"Wrong: {text}." for text in exact.wrong), sep="\n")
    if groups:
        print(f"Not equal to single samples within {FACTOR:g} times the rounding of {dtype}: {', '.join(groups)}.")
    elif exact.wrong:
        print("Not right, although equal to single samples: see above.")
    else:
        print(f"Equal to single samples within the precision of {dtype}.")
    return int(bool(groups or exact.wrong))


def compare(recipe: str, given: Namespace, folder: Path, cfg: DictConfig) -> int:
    """Compares the gradient of a recipe with single samples. Returns the exit code."""
    settings_class, recipe_class = build("recipe", load_recipe, recipe)
    if recipe_class is None:
        raise ConfigError(f"recipe={recipe}: it needs one class with setup() and update()")
    if "mask_ratio" in keys_of(settings_class):
        raise ConfigError(f"recipe={recipe}: losses of images are not compared; give one of texts")
    if cfg.get("quantizer") is not None:
        raise ConfigError("quantizer: fake-quantized weights are not compared; remove it")
    if "groups_per_round" in (OmegaConf.select(cfg, "dataset") or ()):
        raise ConfigError(
            "dataset.groups_per_round: rounds are not compared; take it out, and set path to a file of one"
        )
    cfg = config_of(cfg, settings_class, folder, given.num_samples)
    is_cut, dtype = cut(cfg, folder), cfg.get("dtype") or "fp32"
    recorded = record(recipe_class, cfg, given.config.removesuffix(".yaml"))
    if os.environ.get("RANK", "0") != "0":
        return 0
    own = single_config_of(cfg, device=resolve_device(cfg.get("device")).type)
    how = {"dtype": "fp32", "device": own.device} if is_cut else {"dtype": "fp64", "device": "cpu"}
    with nullcontext() if is_cut else DoublePrecision(only_casts=True):
        exact = SingleSamples(recipe_class, single_config_of(cfg, **how), recorded, judges=True)
    code = report(recorded, exact, SingleSamples(recipe_class, own, recorded).gradients, dtype, is_cut)
    return REPORTED_EXIT_CODE if code and world_size_from_env() > 1 else code


def main() -> None:
    """Compares the recipe given on the command line."""
    parser = parser_of("python -m recipe_utils.check_gradient", __doc__)
    parser.add_argument("--nproc_per_node", type=int, default=1)
    parser.add_argument("--num_samples", type=int, default=64, help="most samples (default 64)")
    given, overrides = parser.parse_known_args()
    recipe, path = paths_of(parser, given)
    with ExitStack() as stack:
        folder = os.environ.get(_FOLDER) or stack.enter_context(tempfile.TemporaryDirectory())
        if given.nproc_per_node > 1:
            os.environ[_FOLDER] = folder
            wait_for_ranks()
            options = ["--standalone", f"--nproc_per_node={given.nproc_per_node}", "-m", "recipe_utils.check_gradient"]
            own = [given.recipe, "--config", given.config, f"--num_samples={given.num_samples}"]
            launch([*options, *own, *overrides])
            return
        sys.argv = [recipe, "--config", path, *overrides]
        signal.signal(signal.SIGINT, lambda *_: sys.exit(1))  # else the folder stays
        sys.exit(entry_point(partial(compare, recipe, given, Path(folder)))())


if __name__ == "__main__":
    main()
